"""Simulates a service on a virtual clock. Imports neither Ray nor torch."""
