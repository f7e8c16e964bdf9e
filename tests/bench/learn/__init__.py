"""Measures the figures of docs/learn.md."""

# Before torch, whose threads read once the environment that this module sets.
from tandem.cluster.local.llm import LLM

__all__ = ["LLM"]
