"""Measures services from the client's side."""
