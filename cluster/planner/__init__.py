"""Measures a model on this machine, and plans a service of it."""
