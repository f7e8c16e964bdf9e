"""Speaks OpenAI's Responses API, without storing any."""
