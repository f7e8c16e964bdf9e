"""Metrics through Ray, traces and logs of the processes of a service."""
