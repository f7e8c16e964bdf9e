"""Compares the simulator's predictions with a service that runs afterwards."""
