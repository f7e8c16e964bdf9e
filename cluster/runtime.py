"""Composes the objects of a router: tokenizer, registry, admission, dispatcher, API servers. Does not import Ray."""

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final, Self

import grpc

from ..proto import worker_pb2
from ..router.api.servers import ApiServers
from ..router.api.service import GenerationService
from ..router.dispatch.dispatcher import Dispatcher
from ..router.frontend.prepare import ServedModel
from ..router.frontend.tokenizer import Tokenizer
from ..router.scheduling.admission import Admission
from ..router.scheduling.registry import WorkerRegistry
from ..workers.model.config import read_context_tokens
from .config import TandemConfig

_LAST_ANSWER_SECONDS: Final = 0.5  # for the errors of requests that did not end in time


class RouterRuntime:
    """Runs one router: started by `start`, gets the list of workers by `update`, ended by `stop`."""

    def __init__(self, registry: WorkerRegistry, dispatcher: Dispatcher, servers: ApiServers) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._servers = servers
        self.grpc_address = servers.grpc_address  # HOST:PORT
        self.http_address = servers.http_address

    @classmethod
    async def start(
        cls, config: TandemConfig, folder: Path, host: str, *, resume_key: bytes, take_free_ports: bool = False
    ) -> Self:
        """Binds both API servers on `host`; their health is NOT_SERVING until there is a decode worker.

        `resume_key`: the secret of all routers of the service, with which each goes on with the others' requests.
        `take_free_ports`: if a configured port is taken, both servers take free ones instead. Raises OSError or
        RuntimeError if a port is taken otherwise."""
        router = config.router
        registry = WorkerRegistry(local_prefill_tokens=router.local_prefill_tokens)
        admission = Admission(
            registry,
            max_queued_tokens=router.max_queued_tokens,
            max_queued_requests=router.max_queued_requests,
            max_queue_seconds=router.max_queue_seconds,
        )
        dispatcher = Dispatcher(registry, admission, park_seconds=router.park_seconds)
        longest = read_context_tokens(folder)
        model = ServedModel(
            name=config.served_name,
            tokenizer=Tokenizer.load(folder),
            context_tokens=min(config.context_tokens or longest, longest),
        )
        start_servers = partial(
            ApiServers.start,
            GenerationService([model], dispatcher, admission, resume_key),
            reflection=router.reflection,
            compression=grpc.Compression.Gzip if router.compression == "gzip" else grpc.Compression.NoCompression,
        )
        try:
            servers = await start_servers(
                grpc_address=f"{host}:{router.grpc_port}", http_address=f"{host}:{router.http_port}"
            )
        except (OSError, RuntimeError):
            if not take_free_ports:
                raise
            servers = await start_servers(grpc_address=f"{host}:0", http_address=f"{host}:0")
        return cls(registry, dispatcher, servers)

    async def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Replaces the registry's list of workers by the directory's."""
        known = list(workers)
        self._registry.update(known)
        await self._servers.set_serving(any(worker.role == worker_pb2.ROLE_DECODE for worker in known))

    async def stop(self, grace: float) -> None:
        """Refuses new requests, gives running ones `grace` seconds, then ends everything. Who is cut reads why."""
        await self._servers.set_serving(False)
        asyncio.get_running_loop().call_later(grace, self._dispatcher.stop)
        await self._servers.stop(grace + _LAST_ANSWER_SECONDS)
        await self._dispatcher.close()
