"""Transfers KV cache from one worker to another."""
