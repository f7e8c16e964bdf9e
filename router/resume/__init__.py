"""Lets clients go on with an answer whose stream broke: resume tokens, event ids, and how often
they are used.
"""
