"""Measures the engine, the sampler's grammars and KV transfers."""
