"""Samples the next tokens: logits processors, filters, grammars, Gumbel-max sampling, log
probabilities.
"""
