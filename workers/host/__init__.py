"""Manages the host's memory and threads for the engine."""
