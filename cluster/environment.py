"""What Ray reads from the environment while it is imported; so this comes first, in programs that own their process."""

import os


def prepare_ray_environment(address: str | None) -> str | None:
    """Makes explicit what Ray would guess; returns the address of the cluster to join, None for a local Ray."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A call that comes late, after the end of Ray, must fail instead of starting another one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if address is None:
        # A local Ray listens beyond loopback; only holders of the token in ~/.ray may use it.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray would run workers at nice 15: whatever else runs on the machine would stall the token streams.
        os.environ.setdefault("RAY_worker_niceness", "0")
    return address
