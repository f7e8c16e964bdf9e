"""Samples tokens: logits processors, filters, grammars, Gumbel-max, log probabilities."""
