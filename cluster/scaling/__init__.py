"""Decides how many workers each pool has, from the load and within bounds."""
