"""Keeps responses, files and batches for clients, separately for each tenant."""
