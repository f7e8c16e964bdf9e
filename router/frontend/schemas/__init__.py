"""Answers questions about parts of JSON schemas. Knows no references and no request."""
