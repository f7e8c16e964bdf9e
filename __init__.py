"""Tandem: distributed inference for large language models, prefill and decode apart."""

__version__ = "0.1.0"
