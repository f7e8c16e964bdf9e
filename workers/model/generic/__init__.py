"""Runs decoders that have no file here through transformers' own modelling code, over our paged
attention.
"""
