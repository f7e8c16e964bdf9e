"""Measures how good the served model is."""
