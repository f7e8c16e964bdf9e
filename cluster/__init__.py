"""Composes a service: config, Ray Serve application, directory, model store, command line."""
