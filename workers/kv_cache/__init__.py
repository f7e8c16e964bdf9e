"""Describes the KV cache without tensors: layout, sharding, resharding and the store interface."""
