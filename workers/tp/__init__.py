"""Runs one worker's model across tensor-parallel ranks."""
