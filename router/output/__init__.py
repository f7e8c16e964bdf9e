"""Turns tokens into answers: detokenization, stop strings, log probabilities, tool calls."""
