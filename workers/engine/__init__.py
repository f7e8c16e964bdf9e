"""Schedules sequences and accounts for blocks in pure Python: no torch, no ray, no grpc."""
