"""Measures the costs of a service with 1,000 workers: placement, control traffic, memory."""
