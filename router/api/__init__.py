"""Serves the public APIs: gRPC and OpenAI's HTTP API."""
