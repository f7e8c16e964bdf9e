"""Holds the layers that models are built of."""
