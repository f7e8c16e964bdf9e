"""Names the deployments of a service, and calls its workers: status, drain, role, reset, adapters.

Each deployment is a Serve application: NAME, then NAME.2, NAME.3 and so on, with its status page at
the route of its name. Does not import Ray.
"""

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message

from ...proto import worker_pb2, worker_pb2_grpc
from ...proto.channel import PeerChannel
from ...proto.errors import InvalidArgument, Unavailable
from ...proto.identity import PeerIdentity
from ...proto.shared_result import SharedResult
from ...router.request import LoraAdapter
from .members import RouterInfo

STATUS_SECONDS: Final = 1.0
_FRESH_SECONDS: Final = 0.2
ANSWER_SECONDS: Final = 10.0  # beyond the time for which a worker waits itself

SWITCH_SECONDS: Final = 2.0
"""The time in which the requests of a worker that switches its role may move."""

MAX_WAIT_SECONDS: Final = 86_400.0
"""The longest time for which a worker waits for its requests."""

_LOAD_SECONDS: Final = 60.0  # of an adapter
_RESET_SECONDS: Final = 60.0  # a worker waits for the write of a block, and for its engine


def deployment_number(service: str, application: str) -> int:
    """Returns the number of an application among the service's deployments, from 1, else 0."""
    found = re.fullmatch(rf"{re.escape(service)}(?:\.(\d+))?", application)
    return 0 if found is None else int(found[1] or 1)


def following(service: str, running: str | None) -> str:
    """Returns the name of the application that replaces the running one."""
    return service if running is None else f"{service}.{deployment_number(service, running) + 1}"


def in_order(service: str, applications: Iterable[str]) -> list[str]:
    """Returns the deployments of the service among `applications`, the oldest first."""
    numbered = {deployment_number(service, name): name for name in applications}
    return [numbered[number] for number in sorted(numbered) if number]


def service_of(application: str) -> str:
    """Returns the name of the service that an application is a deployment of."""
    return re.sub(r"\.\d+$", "", application)


class WorkerStatuses:
    """Asks the workers that a router knows for their status.

    Callers at about the same time share one request to each worker. Channels stay open until their
    worker is gone; call `forget_gone` when the list of workers has changed.
    """

    def __init__(
        self, workers: Callable[[], Iterable[worker_pb2.WorkerInfo]], identity: PeerIdentity
    ) -> None:
        self._workers = workers
        self._identity = identity
        self._channels: dict[str, PeerChannel] = {}  # by address
        self._closing: set[asyncio.Task[None]] = set()
        self._described = SharedResult(self._describe, _FRESH_SECONDS)

    async def get(self) -> list[dict[str, Any]]:
        """Returns each worker as plain data, sorted by id.

        Each has the fields of GetStatusResponse and WorkerInfo by their names, `id`, `role`,
        `state` (ready, draining, or silent if it does not answer within a second), and `transports`
        by the endpoint of each rank from which it has pulled KV cache.
        """
        return await self._described.get()

    def forget_gone(self) -> None:
        """Closes the channels to workers that are gone, each as soon as no call uses it."""
        self._keep({worker.address for worker in self._workers()})

    async def close(self) -> None:
        """Closes the channels."""
        self._keep(())
        await asyncio.gather(*self._closing)

    async def _describe(self) -> list[dict[str, Any]]:
        ordered = sorted(self._workers(), key=lambda worker: worker.worker_id)
        self._keep([worker.address for worker in ordered])
        return list(
            await asyncio.gather(
                *(_describe(worker, self._channel(worker.address)) for worker in ordered)
            )
        )

    def _channel(self, address: str) -> PeerChannel:
        if address not in self._channels:
            self._channels[address] = PeerChannel(address, self._identity)
        return self._channels[address]

    def _keep(self, addresses: Collection[str]) -> None:
        """Begins to close the channels to all other addresses."""
        for address in self._channels.keys() - set(addresses):
            closing = asyncio.create_task(_close_unused(self._channels.pop(address)))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


async def _close_unused(channel: PeerChannel) -> None:
    """Closes a channel after its last call, which has a deadline; closing cancels a call."""
    if channel.num_calls:
        unused = asyncio.Event()
        channel.on_unused = unused.set
        await unused.wait()
    await channel.close()


def describe_routers(routers: Iterable[RouterInfo], *, has_tls: bool) -> list[dict[str, str]]:
    """Returns each router as plain data: its id, its addresses, and the URL of its console."""
    scheme = "https" if has_tls else "http"
    return [
        {
            "id": each.router_id,
            "grpc": each.grpc_address,
            "http": each.http_address,
            "ops": each.ops_address,
            "console": f"{scheme}://{each.http_address}/console",
        }
        for each in routers
    ]


async def drain_workers(
    addresses: Sequence[str], timeout: float, identity: PeerIdentity
) -> list[int | None]:
    """Tells workers to refuse new requests; waits until they have none, or for the timeout.

    Returns the number of requests left at each worker, None for one that does not answer.
    """
    answers: list[worker_pb2.DrainResponse | None] = await _call_workers(
        "Drain",
        worker_pb2.DrainRequest(timeout_seconds=timeout),
        addresses,
        identity,
        timeout=timeout + ANSWER_SECONDS,
    )
    return [None if answer is None else answer.num_requests for answer in answers]


async def switch_worker(address: str, role: str, timeout: float, identity: PeerIdentity) -> int:
    """Gives a worker another role; waits until its requests have moved, or for the timeout.

    Returns the number of requests of the earlier role that are left. Raises Unavailable if the
    worker does not answer, as it does not to strangers, or keeps its role.
    """
    (answer,) = await _call_workers(
        "SwitchRole",
        worker_pb2.SwitchRoleRequest(role=f"ROLE_{role.upper()}", timeout_seconds=timeout),
        [address],
        identity,
        timeout=timeout + ANSWER_SECONDS,
    )
    if answer is None:
        raise Unavailable("the worker does not answer, or --identity is of another service")
    if answer.error:
        raise Unavailable(answer.error)
    return int(answer.num_requests)


async def reset_caches(workers: Mapping[str, str], identity: PeerIdentity) -> dict[str, str]:
    """Empties the prefix caches of workers, given as addresses by id, at one time.

    Returns by id the reason why a worker has not emptied its cache.
    """
    answers: list[worker_pb2.ResetPrefixCacheResponse | None] = await _call_workers(
        "ResetPrefixCache",
        worker_pb2.ResetPrefixCacheRequest(time=time.time_ns()),
        list(workers.values()),
        identity,
        timeout=_RESET_SECONDS,
    )
    reasons = ["no answer" if answer is None else answer.error for answer in answers]
    return {name: reason for name, reason in zip(workers, reasons, strict=True) if reason}


async def load_on_workers(
    adapter: LoraAdapter, addresses: Sequence[str], identity: PeerIdentity
) -> None:
    """Tells workers to load an adapter.

    Workers that do not answer load it with their first request. Raises InvalidArgument with the
    first reason why a worker cannot load it, Unavailable if no worker answers.
    """
    answers: list[worker_pb2.LoadAdapterResponse | None] = await _call_workers(
        "LoadAdapter",
        worker_pb2.LoadAdapterRequest(adapter=adapter.message()),
        addresses,
        identity,
        timeout=_LOAD_SECONDS,
    )
    answered = [answer.error for answer in answers if answer is not None]
    if reason := next(filter(None, answered), ""):
        raise InvalidArgument(reason.removeprefix("adapter: "), "lora_path")
    if not answered:
        raise Unavailable("no worker could be asked to load the adapter")


async def _call_workers(
    method: str,
    request: Message,
    addresses: Sequence[str],
    identity: PeerIdentity,
    *,
    timeout: float,
) -> list[Any]:
    """Calls a method of each worker; returns the responses, None for each that does not answer."""

    async def call(address: str) -> Any:
        async with PeerChannel(address, identity) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            try:
                return await getattr(stub, method)(request, timeout=timeout)
            except grpc.aio.AioRpcError:
                return None

    return await asyncio.gather(*map(call, addresses))


async def _describe(worker: worker_pb2.WorkerInfo, channel: PeerChannel) -> dict[str, Any]:
    status = worker_pb2.GetStatusResponse(info=worker)
    state = "silent"
    try:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
        status.info.application = worker.application  # which only the directory knows
        state = "draining" if status.info.draining else "ready"
    except grpc.aio.AioRpcError:
        pass  # the state stays "silent"
    role = worker_pb2.Role.Name(status.info.role).removeprefix("ROLE_").lower()
    fields = _scalars(status) | _scalars(status.info)
    transports = dict(sorted(status.transports.items()))
    named = {"id": status.info.worker_id, "role": role, "state": state, "transports": transports}
    return fields | named | {"load": _scalars(status.info.load)}


def _scalars(message: Message) -> dict[str, Any]:
    """Returns the scalar fields of a message by name, without absent ones; bytes as hex digits."""
    names = [
        field.name
        for field in message.DESCRIPTOR.fields
        if field.message_type is None and (not field.has_presence or message.HasField(field.name))
    ]
    values = {name: getattr(message, name) for name in names}
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()
    }
