"""Uses the parts of Ray that are private and have no public substitute; no other module uses any.

Every function raises Unavailable, with the version of Ray, if that version lacks the part.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def without_idle_processes(*, dashboard: bool) -> Iterator[None]:
    """Lets `ray.init` in the block start no process that a local Ray does not need.

    The log monitor prints logs of workers, which Tandem leaves to files. The other monitor resizes
    a cluster. The dashboard's process starts even without its pages, and Ray waits for it. Each
    takes half a second of a core. `dashboard`: the dashboard's process is needed.
    """
    node = _internal("ray._private.node", "Node")
    names = ["start_log_monitor", "start_monitor", *([] if dashboard else ["start_api_server"])]
    kept = {name: _internal_of(node, name, "its class Node") for name in names}
    for name in names:
        setattr(node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(node, name, method)


def _start_nothing(node: object, **options: object) -> None:
    """Stands in for a method of Ray's Node that starts a process."""


@contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Lets `ray.init` in the block start its processes with these variables in their environment.

    All other children of this process would inherit variables of its own environment.
    """
    services = _internal("ray._private", "services")
    start = _internal_of(services, "start_ray_process", "its module services")

    def start_with(*args: Any, env_updates: Mapping[str, str] | None = None, **options: Any) -> Any:
        return start(*args, env_updates={**(env_updates or {}), **variables}, **options)

    services.start_ray_process = start_with
    try:
        yield
    finally:
        services.start_ray_process = start


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
