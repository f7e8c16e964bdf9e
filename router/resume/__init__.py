"""Lets clients go on with an answer whose stream broke, by resume tokens and event ids."""
