"""Scheduling and block accounting in pure Python: no torch, no ray, no grpc."""
