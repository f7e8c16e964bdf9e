"""Holds the linear methods: one file for each form in which a linear layer's weights are kept and
multiplied.
"""
