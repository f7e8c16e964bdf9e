"""A router's view of the workers: who they are, and how much context they hold."""
