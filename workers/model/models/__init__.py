"""Holds the model families: one file a family, with its config parser and its module tree."""
