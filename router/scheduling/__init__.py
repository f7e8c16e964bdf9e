"""Decides when a request starts and on which workers: admission, queues, placement."""
