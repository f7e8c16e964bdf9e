"""Describes the KV cache without tensors.

Contains layout, sharding, resharding, the order of eviction, and the store interface.
"""
