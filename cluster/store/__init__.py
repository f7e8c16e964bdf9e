"""Finds, downloads and converts models."""
