"""Prepares requests: chat templates, tokenization, constraints, every bound."""
