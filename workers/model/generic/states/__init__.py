"""Computes the mixers of transformers' layers that keep a state."""
