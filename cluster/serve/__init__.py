"""Runs the service on Ray: applications, replicas, the directory of members, redeployment."""
