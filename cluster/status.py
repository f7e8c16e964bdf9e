"""What a worker holds right now, asked of the worker itself."""

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc.aio

from ..proto import worker_pb2, worker_pb2_grpc
from ..proto.channel import peer_channel

ASK_SECONDS: Final = 1.0


async def describe_workers(workers: Iterable[worker_pb2.WorkerInfo]) -> list[dict[str, Any]]:
    """Each worker as plain data, sorted by id; one that does not answer within a second says so in `state`."""
    ordered = sorted(workers, key=lambda worker: worker.worker_id)
    return list(await asyncio.gather(*(_describe(worker) for worker in ordered)))


async def _describe(worker: worker_pb2.WorkerInfo) -> dict[str, Any]:
    answer = worker_pb2.GetStatusResponse(info=worker)
    state = "silent"
    async with peer_channel(worker.address) as channel:
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            answer = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=ASK_SECONDS)
            state = "draining" if answer.info.draining else "ready"
        except grpc.aio.AioRpcError:
            pass  # `state` tells it
    info = answer.info
    return {
        "id": info.worker_id,
        "role": worker_pb2.Role.Name(info.role).removeprefix("ROLE_").lower(),
        "state": state,
        "epoch": info.epoch,
        "address": info.address,
        "block_size": info.block_size,
        "context_tokens": info.context_tokens,
        "tp": info.tp,
        "transports": dict(sorted(answer.transports.items())),
        "sessions": answer.num_sessions,
        "leases": answer.num_leases,
        "transfers": answer.num_transfers,
        "jobs": answer.num_requests,
        "balanced": answer.integrity_ok,
        "load": {field.name: getattr(info.load, field.name) for field in worker_pb2.WorkerLoad.DESCRIPTOR.fields},
    }
