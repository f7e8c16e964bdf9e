"""Carries requests through workers and their failures."""
