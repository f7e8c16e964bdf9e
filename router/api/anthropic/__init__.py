"""Speaks Anthropic's Messages API."""
