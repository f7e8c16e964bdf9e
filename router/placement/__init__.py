"""Which workers a request goes to: what the router knows of them, and the policy over it."""
