"""Sets what Ray reads from the environment while it is imported; a program calls this before it imports Ray."""

import os


def prepare_ray_environment(address: str | None) -> str | None:
    """Sets Ray's variables explicitly; returns the address of the cluster to join, None for a local Ray."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call after the end of Ray must fail instead of starting another Ray.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address is None:
        # A local Ray listens beyond loopback: require the token in ~/.ray.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray would run workers at nice 15: whatever else runs on the machine would stall the token streams.
        os.environ.setdefault("RAY_worker_niceness", "0")
    return address
