"""Chooses the next tokens: logits processors, filters, grammars, sampling."""
