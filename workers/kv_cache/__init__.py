"""Describes KV cache without tensors: layout, sharding, resharding, the store's protocol."""
