"""Evaluates the served model."""
