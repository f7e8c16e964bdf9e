"""Serves OpenAI's Files and Batch APIs."""
