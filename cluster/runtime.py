"""The plain objects of a router, put together: tokenizer, view, dispatcher, front doors. Knows nothing of Ray."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

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


class RouterRuntime:
    """Opened by `open`, told of workers by `update`, ended by `close`."""

    def __init__(self, view: WorkerRegistry, dispatcher: Dispatcher, server: ApiServers) -> None:
        self._view = view
        self._dispatcher = dispatcher
        self._server = server
        self.grpc_address = server.grpc_address
        self.http_address = server.http_address

    @classmethod
    async def open(cls, config: TandemConfig, folder: Path, host: str) -> Self:
        """Binds both front doors on `host`; they say that they cannot serve until there is a decode worker."""
        router = config.router
        view = WorkerRegistry(local_prefill_tokens=router.local_prefill_tokens)
        admission = Admission(
            view,
            max_queued_tokens=router.max_queued_tokens,
            max_queued_requests=router.max_queued_requests,
            max_queue_seconds=router.max_queue_seconds,
        )
        dispatcher = Dispatcher(view, admission)
        longest = read_context_tokens(folder)
        model = ServedModel(
            name=config.served_name,
            tokenizer=Tokenizer.load(folder),
            context_tokens=min(config.context_tokens or longest, longest),
        )
        server = await ApiServers.start(
            GenerationService([model], dispatcher, admission),
            grpc_address=f"{host}:{router.grpc_port}",
            http_address=f"{host}:{router.http_port}",
            reflection=router.reflection,
            compression=grpc.Compression.Gzip if router.compression == "gzip" else grpc.Compression.NoCompression,
        )
        return cls(view, dispatcher, server)

    async def update(self, workers: Iterable[worker_pb2.WorkerInfo]) -> None:
        """Takes over what the directory knows."""
        known = list(workers)
        self._view.update(known)
        await self._server.set_serving(any(worker.role == worker_pb2.ROLE_DECODE for worker in known))

    async def close(self, grace: float) -> None:
        """Refuses new requests, gives running ones `grace` seconds, then ends everything."""
        await self._server.set_serving(False)
        await self._server.stop(grace)
        await self._dispatcher.close()
