"""Implements the tandem command."""
