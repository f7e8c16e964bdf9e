"""Holds the Triton kernels for GPUs."""
