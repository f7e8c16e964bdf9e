"""Shows the arithmetic of inference: for any model, and next to a measured completion."""
