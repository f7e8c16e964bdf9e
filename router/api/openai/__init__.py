"""Serves OpenAI's HTTP API over the generation service."""
