"""Runs the engine without Ray: in the process of a notebook or a script, and for batches of
requests.
"""
