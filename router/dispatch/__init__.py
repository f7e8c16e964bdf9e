"""Dispatches requests to workers and continues them after interruptions."""
