"""The front doors: gRPC and OpenAI's HTTP API, thin over `completion`."""
