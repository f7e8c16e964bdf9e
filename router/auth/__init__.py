"""Who calls: API keys, what each may use, tenants."""
