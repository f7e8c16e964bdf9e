"""Decides how many workers each pool has: by what arrives, within bounds, without haste."""
