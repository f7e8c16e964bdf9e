"""Decides which requests are watermarked, and finds the watermark in texts."""
