"""Runs the engine without Ray: in a notebook or a script, and for batches of requests."""
