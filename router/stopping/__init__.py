"""Decides where a completion stops by its text or its tokens. Knows no tokenizer and no request."""
