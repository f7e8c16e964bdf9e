"""Serves OpenAI's Responses API, and stores responses for clients that continue them."""
