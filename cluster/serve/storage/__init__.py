"""Runs the store of responses, files and batches beside the directory, and answers batches."""
