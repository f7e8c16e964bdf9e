"""Replaces a running service by another of the same name on a Ray cluster, without interruption.

Each deployment of a service is a Serve application: see `status`. They share the directory, so the
routers of both know the workers of both. The new one starts beside the old one. Then the old
workers drain, and their sequences move to the new workers. Then the old application is deleted; its
routers let running streams end within their grace. New routers listen on the ports of the old ones
meanwhile: see `ports.PortClaim`.
"""

import hmac
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview

from ...proto.errors import Unavailable
from ...proto.identity import PeerIdentity
from ..config import TandemConfig
from ..scaling.policy import DECODE_POOL, ROUTER
from .directory import NAMESPACE
from .identity_file import kept_salt, read_identity
from .members import Continuity
from .peer_tls import peer_tls
from .ray_internals import begin_delete
from .status import deployment_number, in_order

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 30.0
"""The time that the old workers' requests have to end; other workers recompute the rest."""

_CALL_SECONDS: Final = 10.0
_CHECK_SECONDS: Final = 1.0


def applications_of(service: str) -> list[str]:
    """Returns the Serve applications of a service, the oldest first."""
    return in_order(service, serve.status().applications)


def running_application(service: str, seconds: float) -> str | None:
    """Returns the running application of a service, or None.

    If a command has died while it started or replaced the service, first ends the application that
    is not needed. Raises Unavailable if a living command starts or replaces the service, or if that
    end takes longer than `seconds`.
    """
    found = serve.status().applications
    names = in_order(service, found)
    if not names or (len(names) == 1 and found[names[0]].status == "RUNNING"):
        return names[0] if names else None
    if _is_announced(names[-1]):
        raise Unavailable(
            f"name: another command starts or replaces the service {service!r} already, with "
            f"{' and '.join(names)}; wait for it, or end it"
        )
    ended = _end_needless(service, seconds)
    left = applications_of(service)
    if ended in left:
        raise Unavailable(
            f"name: {ended} of the service {service!r} has not ended yet, though no command starts "
            "it any more; start the service again when it has ended"
        )
    return left[0] if left else None


def _end_needless(service: str, seconds: float) -> str | None:
    """Ends an application that no command starts or replaces any more; returns its name, or None.

    A lone application is ended only if its start has failed. Of two applications, this is the new
    one if it is not ready yet; otherwise the old one, which may be drained.
    """
    found = serve.status().applications
    names = in_order(service, found)
    if not names:
        return None
    old, new = names[0], names[-1]
    if old == new and not _has_failed_to_start(found[new]):
        return None
    log.warning("the command that started %s has ended too early", new)
    if old != new and (found[new].status == "RUNNING" or found[old].status == "DELETING"):
        retire(old, serve.get_app_handle(new), seconds)
        return old
    begin_delete(new)
    _wait_until_gone(new, seconds)
    return new


def _has_failed_to_start(application: ApplicationStatusOverview) -> bool:
    """Returns True if the start has failed, and no router or no decode worker runs.

    A failed update of Serve's configuration may leave the earlier replicas, which go on.
    """

    def runs(name: str) -> bool:
        deployment = application.deployments.get(name)
        return deployment is not None and bool(
            deployment.replica_states.keys() - {"STARTING", "STOPPING"}
        )

    return application.status == "DEPLOY_FAILED" and not (runs(ROUTER) and runs(DECODE_POOL))


class Replacement:
    """Runs in an actor as long as the command that starts a service. Has no methods."""


@contextmanager
def announced(application: str) -> Iterator[None]:
    """Tells other commands that this process starts `application`.

    Ray ends the actor that tells it with this process, also if the process is killed. Raises
    Unavailable if another process has announced the application.
    """
    actor = ray.remote(Replacement)
    try:
        handle = actor.options(
            name=_announcement(application), namespace=NAMESPACE, num_cpus=0, max_restarts=-1
        ).remote()
    except ValueError:
        raise Unavailable(
            f"name: another command starts {application} already; wait for it, or end it"
        ) from None
    try:
        yield
    finally:
        del handle  # with the last handle, Ray ends the actor


def _is_announced(application: str) -> bool:
    """Returns True if the process that has announced the application lives."""
    try:
        ray.get_actor(_announcement(application), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def _announcement(application: str) -> str:
    return f"{application}-replacement"


def take_over(config: TandemConfig, folder: str, running: str | None, *, local: bool) -> Continuity:
    """Returns the continuity of the running application, or a new one if none runs.

    Raises Unavailable if the running application cannot be replaced.
    """
    if running is None:
        return first_continuity(config, folder, local=local)
    layout = _layout(config, folder)
    try:
        handle = serve.get_app_handle(running)
        found: Continuity = handle.continuity.remote().result(timeout_s=_CALL_SECONDS)
    except Exception as error:  # Ray may raise any exception
        raise Unavailable(
            "name: the service of this name is running, but does not answer; stop it first"
        ) from error
    check_continuity(config.name, found, layout)
    return found


def first_continuity(config: TandemConfig, folder: str, *, local: bool = False) -> Continuity:
    """Returns the continuity of a new service; with `identity_file` it is the same each time.

    Without that file, only the secret of prefixes in KV cache on disk outlives a restart. Raises
    NotFound if the file cannot be read.
    """
    if config.identity_file is not None:
        identity = read_identity("", Path(config.identity_file))
    else:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        addresses = [node["NodeManagerAddress"] for node in nodes if node["Alive"]]
        identity = PeerIdentity.generate(peer_tls(config.peer_tls, addresses))
    return Continuity(
        identity=identity,
        resume_key=hmac.digest(identity.secret, b"resume", "sha256"),
        layout=_layout(config, folder),
        ends_with_launcher=local,
        cache_secret=_kept_cache_secret(config),
    )


def _kept_cache_secret(config: TandemConfig) -> bytes | None:
    """Returns the secret of the tenants' salts, or None if no KV cache outlives the identity.

    The launcher keeps a salt beside that cache and gives the secret to all routers, also of later
    deployments. If it cannot keep the salt, tenants find no prefix after a restart.
    """
    folders = list(
        dict.fromkeys(Path(pool.kv_disk) for pool in config.pools.values() if pool.kv_disk)
    )
    if not folders or config.identity_file is not None or not config.auth.needs_key:
        return None
    try:
        salt = kept_salt(folders)
    except Unavailable as error:
        log.warning("kv_disk: no prefix of a tenant will be found after a restart: %s", error)
        return None
    return hmac.digest(salt, f"prefixes of {config.name}".encode(), "sha256")


def _layout(config: TandemConfig, folder: str) -> bytes:
    from ...workers.model.loader import open_checkpoint  # with torch, which takes a second

    checkpoint = open_checkpoint(
        Path(folder),
        config.model_impl,
        quantization=config.quantization,
        context_tokens=config.context_tokens,
    )
    return checkpoint.kv_layout(config.dtype, config.kv_cache_dtype).digest


def check_continuity(service: str, running: Continuity, layout: bytes) -> None:
    """Raises Unavailable if a service with this layout cannot replace the running one."""
    if running.ends_with_launcher:
        raise Unavailable(
            f"name: the service {service!r} ends with the command that started its Ray; stop it "
            "first"
        )
    if running.layout != layout:
        raise Unavailable(
            f"name: the service {service!r} serves another model, dtype, quantization or "
            "kv_cache_dtype; stop it first"
        )


def retire(application: str, router: DeploymentHandle[Any], seconds: float) -> None:
    """Drains the workers of a replaced application, then deletes it.

    `router` belongs to the application that replaces it. Waits at most `seconds` after the drain
    for the end. A signal deletes the application as well: its drained workers refuse everything.
    """
    try:
        left = router.drain_others.remote(DRAIN_SECONDS).result(
            timeout_s=DRAIN_SECONDS + _CALL_SECONDS
        )
        if left:
            log.warning("%d requests are left at the replaced workers", left)
    except Exception as error:  # other workers recompute the streams, whatever failed
        log.warning("the replaced workers did not drain: %s", type(error).__name__)
    finally:
        begin_delete(application)
    _wait_until_gone(application, seconds)


def _wait_until_gone(application: str, seconds: float) -> None:
    """Waits at most about `seconds` for the end of an application that is deleted."""
    gone = threading.Event()
    for _ in range(round(seconds / _CHECK_SECONDS) or 1):
        if application not in serve.status().applications:
            return
        gone.wait(_CHECK_SECONDS)
    log.warning("%s has not ended after %.0f s", application, seconds)


@contextmanager
def watched_successor(
    service: str, application: str, on_replaced: Callable[[], object]
) -> Iterator[None]:
    """Calls `on_replaced` once a later application of the service replaces this one.

    Checks in a thread while the context is open: calls to a Ray that has died never end.
    """
    stopped = threading.Event()

    def check() -> None:
        while not stopped.wait(_CHECK_SECONDS):
            with suppress(Exception):  # Ray may raise any exception while parts of it are away
                if is_replaced(service, application) and not stopped.is_set():
                    on_replaced()
                    return

    thread = threading.Thread(target=check, name="tandem-successor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_CHECK_SECONDS)


def is_ending(service: str, application: str) -> bool:
    """Returns True while the application exists, or only ending ones of its service exist."""
    found = serve.status().applications
    names = in_order(service, found)
    is_last = all(found[name].status == "DELETING" for name in names)
    return application in found or (bool(names) and is_last)


def is_replaced(service: str, application: str) -> bool:
    """Returns True if the application is gone or ending and a later one of its service exists."""
    found = serve.status().applications
    known = found.get(application)
    is_going = known is None or known.status == "DELETING"
    number = deployment_number(service, application)
    return is_going and any(deployment_number(service, name) > number for name in found)
