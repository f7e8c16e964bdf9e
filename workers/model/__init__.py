"""Model execution on torch: weights, decoder, attention, sampling, KV tensors."""
