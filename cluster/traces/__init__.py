"""Reads traces of requests, and makes their prompts."""
