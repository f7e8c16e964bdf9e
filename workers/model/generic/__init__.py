"""Runs decoders without a family of their own through transformers' code, with paged attention."""
