"""Measures services as their users see them."""
