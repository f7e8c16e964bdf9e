"""Runs the HTTP and gRPC servers: connections, limits, audit log, health and status pages."""
