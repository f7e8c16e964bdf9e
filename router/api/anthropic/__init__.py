"""Serves Anthropic's Messages API."""
