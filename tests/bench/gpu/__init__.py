"""Measures what only a GPU can show; each part runs in a process of its own."""
