"""Reads and writes KV cache in canonical form, in host memory and on GPUs."""
