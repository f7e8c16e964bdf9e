"""The composition root: config, Ray Serve application, directory, model store, command line."""
