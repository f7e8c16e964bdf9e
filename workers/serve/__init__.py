"""Runs a worker: its engine thread, sessions with routers, checks of requests, KV tiers."""
