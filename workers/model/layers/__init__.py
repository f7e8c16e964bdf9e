"""Holds the layers that models are built of; each knows its rank's part of its parameters."""
