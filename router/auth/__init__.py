"""Authenticates callers: API keys with their limits, tenants, and TLS."""
