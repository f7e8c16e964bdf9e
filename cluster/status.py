"""Queries the status of each worker from the worker itself."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message

from ..proto import worker_pb2, worker_pb2_grpc
from ..proto.channel import PeerChannel
from ..proto.identity import PeerIdentity

STATUS_SECONDS: Final = 1.0


async def describe_workers(workers: Iterable[worker_pb2.WorkerInfo], identity: PeerIdentity) -> list[dict[str, Any]]:
    """Returns each worker as plain data, sorted by id: the fields of GetStatusResponse and WorkerInfo by their names,
    `id`, `role`, `state` (ready, draining, or silent for one that does not answer within a second), and `transports` by
    the endpoint of each rank from which it has pulled KV cache."""
    ordered = sorted(workers, key=lambda worker: worker.worker_id)
    return list(await asyncio.gather(*(_describe(worker, identity) for worker in ordered)))


async def _describe(worker: worker_pb2.WorkerInfo, identity: PeerIdentity) -> dict[str, Any]:
    status = worker_pb2.GetStatusResponse(info=worker)
    state = "silent"
    async with PeerChannel(worker.address, identity) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
            state = "draining" if status.info.draining else "ready"
        except grpc.aio.AioRpcError:
            pass  # `state` says so
    role = worker_pb2.Role.Name(status.info.role).removeprefix("ROLE_").lower()
    fields = _scalars(status) | _scalars(status.info)
    transports = dict(sorted(status.transports.items()))
    named = {"id": status.info.worker_id, "role": role, "state": state, "transports": transports}
    return fields | named | {"load": _scalars(status.info.load)}


def _scalars(message: Message) -> dict[str, Any]:
    """Returns the fields of a message that hold a number, text or flag, by name."""
    fields = message.DESCRIPTOR.fields
    return {field.name: getattr(message, field.name) for field in fields if field.message_type is None}
