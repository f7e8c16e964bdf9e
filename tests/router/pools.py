"""Workers as a directory describes them, their reports, and requests, for tests of a router without
workers.
"""

from collections.abc import Iterable, Sequence

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL
from tandem.router.request import TokenRequest
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests.token_request import token_request

BLOCK_SIZE = 16


class Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def info(
    worker_id: str,
    role: "worker_pb2.Role",
    *,
    epoch: int = 1,
    draining: bool = False,
    max_sequences: int = 0,
    num_blocks: int = 256,
    block_size: int = BLOCK_SIZE,
) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=worker_id,
        epoch=epoch,
        role=role,
        block_size=block_size,
        load=worker_pb2.WorkerLoad(free_blocks=num_blocks, total_blocks=num_blocks),
        draining=draining,
        max_sequences=max_sequences,
        mixed_chunk_tokens=32,
    )


def report(
    registry: WorkerRegistry,
    worker_id: str,
    *,
    epoch: int = 1,
    load: worker_pb2.WorkerLoad | None = None,
    stored: Iterable[bytes] = (),
    evicted: Iterable[bytes] = (),
) -> None:
    """A worker's session reports its load, or what its prefix cache has stored and evicted."""
    message = worker_pb2.SessionResponse(load=load, stored_blocks=stored, evicted_blocks=evicted)
    registry.report(worker_id, epoch, message)


def fill(
    registry: WorkerRegistry,
    *,
    prefill: int,
    decode: int,
    max_sequences: int = 0,
    num_blocks: int = 256,
) -> None:
    """Workers p0, p1, ... and d0, d1, ..."""
    registry.update(
        [info(f"p{n}", ROLE_PREFILL, num_blocks=num_blocks) for n in range(prefill)]
        + [
            info(f"d{n}", ROLE_DECODE, max_sequences=max_sequences, num_blocks=num_blocks)
            for n in range(decode)
        ]
    )


def request(
    prompt: Sequence[int],
    name: str = "",
    *,
    max_tokens: int = 8,
    num_choices: int = 1,
    priority: int = 0,
    tenant: str = "",
    deadline: float | None = None,
    cache_salt: bytes = b"",
) -> TokenRequest:
    return token_request(
        prompt,
        max_tokens,
        name=name,
        sampling=inference_pb2.SamplingParams(),
        num_choices=num_choices,
        priority=priority,
        tenant=tenant,
        arrived=0.0,
        deadline=deadline,
        cache_salt=cache_salt,
    )
