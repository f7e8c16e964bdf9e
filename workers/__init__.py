"""The data plane: engines, models and KV transfer. Usable without Ray."""
