"""Computes layers that keep a state for each sequence: convolutions and recurrences."""
