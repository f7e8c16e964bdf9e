"""Formats of tool calls and of reasoning."""
