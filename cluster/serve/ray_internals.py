"""Uses the parts of Ray that are private and have no public substitute; no other module uses any.

Every function raises Unavailable, with the version of Ray, if that version lacks the part.
"""

from importlib import import_module
from typing import Any

import ray
from ray import serve

from ...proto.errors import Unavailable


def serve_http_address() -> tuple[str, int]:
    """Returns the host and the port of the HTTP proxy of the Serve that runs.

    `serve.start` changes nothing in a Serve that runs already, and no public function tells its
    port.
    """
    client = _internal("ray.serve.context", "_get_global_client")()
    options = _internal_of(client, "http_config", "Serve's client")
    return options.host, options.port


def stop_log_monitor() -> None:
    """Ends the log monitor of a local Ray.

    It reads all log files for drivers that print them, but Tandem starts Ray with
    `log_to_driver=False`.
    """
    node = _internal("ray._private.worker", "_global_node")
    if node is not None:
        _internal_of(node, "kill_log_monitor", "its node")(check_alive=False)


def begin_delete(application: str) -> None:
    """Tells Serve to delete an application, and does not wait.

    `serve.delete` itself looks only once a second whether the application has ended.
    """
    try:
        serve.delete(application, _blocking=False)
    except TypeError as error:
        raise _missing("the parameter `_blocking` of ray.serve.delete") from error


def _internal(module: str, name: str) -> Any:
    """Returns an attribute of a module of Ray."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error


def _internal_of(owner: object, name: str, described: str) -> Any:
    """Returns an attribute of one of Ray's objects; an error names the object as `described`."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(f"`{name}` of {described}") from error


def _missing(part: str) -> Unavailable:
    return Unavailable(
        f"Ray {ray.__version__} lacks {part}, which Tandem uses; install the version of Ray in "
        "constraints.txt"
    )
