"""Holds the C kernels for CPUs, builds them at first use and calls them."""
