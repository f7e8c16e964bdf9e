"""Calls Ray's dashboard as KubeRay's operator does: writes Serve's configuration, reads status."""

import json
import time
import urllib.request
from typing import Any, Final

PATH: Final = "/api/serve/applications/"
CHECK_SECONDS: Final = 0.2


def put_config(dashboard: str, config: dict[str, Any]) -> None:
    """Deploys; the dashboard is HOST:PORT."""
    request = urllib.request.Request(
        f"http://{dashboard}{PATH}",
        data=json.dumps(config).encode(),
        headers={"Content-Type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def application(dashboard: str) -> dict[str, Any]:
    """Returns Serve's status of the application tandem; {} before it exists."""
    with urllib.request.urlopen(f"http://{dashboard}{PATH}", timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)["applications"].get("tandem", {})
    return found


def settled(dashboard: str, status: str) -> dict[str, Any] | None:
    """Returns the application if it has this status, and as many replicas as it should have."""
    try:
        found = application(dashboard)
    except OSError:  # as while a head starts
        return None
    counts = [
        len([replica for replica in each["replicas"] if replica["state"] == "RUNNING"])
        == each["target_num_replicas"]
        == len(each["replicas"])
        for each in found.get("deployments", {}).values()
    ]
    return found if found.get("status") == status and (status != "RUNNING" or all(counts)) else None


def wait_for(dashboard: str, status: str, seconds: float = 250.0) -> dict[str, Any]:
    """Returns the application when it has this status, and as many replicas as it should have."""
    deadline = time.monotonic() + seconds
    while (found := settled(dashboard, status)) is None:
        assert time.monotonic() < deadline, application(dashboard)
        time.sleep(CHECK_SECONDS)
    return found
