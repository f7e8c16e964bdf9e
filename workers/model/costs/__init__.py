"""Computes the FLOPs, the bytes and the least time of a model's inference."""
