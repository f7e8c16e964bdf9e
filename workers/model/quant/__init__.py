"""Holds the linear methods, and the formats in which checkpoints store linear weights."""
