"""Serves OpenAI's Responses API; it stores no responses."""
