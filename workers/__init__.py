"""Holds the data plane: engines, models and KV transfer. Works without Ray."""
