"""Runs a worker, and what a router does for its requests, in one event loop: an engine for the
process that holds it.

The parts are those of the service, but that there is one worker, no server in front of it, and no
bound on who waits.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self, Unpack

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError, InvalidArgument, TandemError
from ...proto.identity import PeerIdentity
from ...router.adapters import AdapterAdmin, AdapterRegistry
from ...router.api.service import GenerationService, tandem_errors_only
from ...router.auth.authenticator import Caller
from ...router.client.request import generate_request, text_prompt, tokenize_request
from ...router.client.results import Collector
from ...router.client.types import Completion, ModelInfo, Options
from ...router.dispatch.dispatcher import Dispatcher
from ...router.frontend.prepare import RequestContext, ServedModel
from ...router.frontend.prepared import PreparedRequest
from ...router.frontend.tokenizer import Tokenizer
from ...router.scheduling.admission import Admission
from ...router.scheduling.registry import WorkerRegistry
from ...workers.serve.worker import Worker
from ..config import TandemConfig
from ..store.adapters import named_adapter
from ..store.generation_defaults import generation_defaults
from .environment import compute_environment
from .lora import LoRARequest
from .ranks import local_ranks
from .session import LocalChannel
from .worker import rank_threads, worker_config

_HOST: Final = "127.0.0.1"  # of the ranks of a group; without one there is no port
_UNBOUNDED: Final = 1 << 40
_LONG_SECONDS: Final = 1e8
_HEALTH_SECONDS: Final = 1.0
_FAILED: Final = "the engine has failed; make a new one"


class LocalEngine:
    """Generates as a service does. Make one with `start`, end it with `close`; lives in one event
    loop.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        config: TandemConfig,
        defaults: Mapping[str, float],
    ) -> None:
        registry = WorkerRegistry()
        registry.update([worker.info()])
        admission = Admission(
            registry,
            max_queued_tokens=_UNBOUNDED,
            max_queued_requests=_UNBOUNDED,
            max_queue_seconds=_LONG_SECONDS,
        )
        model = ServedModel(
            name=config.served_name,
            tokenizer=tokenizer,
            context_tokens=worker.info().context_tokens,
            defaults=defaults,
        )
        self.defaults = defaults
        self._worker = worker
        self._adapters, self._max_lora_rank = AdapterRegistry(), config.lora.max_lora_rank
        self._dispatcher = Dispatcher(
            registry,
            admission,
            identity=PeerIdentity.generate(),
            connect=lambda *_: LocalChannel(worker),
        )
        adapters = AdapterAdmin(self._adapters)
        self._model_names = (model.name, *config.aliases)
        self.service = GenerationService(
            [model], self._dispatcher, admission, adapters=adapters, aliases=config.aliases
        )
        self.max_sequences = worker.info().max_sequences
        self._scope = AsyncExitStack()

    @classmethod
    async def start(cls, config: TandemConfig, folder: Path) -> Self:
        """Loads the model in `folder` as `config.decode` says, its ranks but the first as processes
        of their own.

        Raises what `Worker.start` raises, Unavailable if another rank does not start, and
        ValueError for a folder without a tokenizer.
        """
        pool = config.decode
        async with AsyncExitStack() as scope:
            threads = rank_threads(pool.num_threads, pool.tp, 0)
            own = worker_config(
                config, "decode", str(folder), threads, PeerIdentity.generate(), host=_HOST
            )
            # A process that waits for its user does no work of its own; the user may read what the
            # process may.
            own = replace(
                own, canary_seconds=math.inf, rank=replace(own.rank, adapter_folders=("/",))
            )
            parsers = config.tool_call_parser, config.reasoning_parser
            tokenizer = await asyncio.to_thread(Tokenizer.load, folder, *parsers)
            ranks = await scope.enter_async_context(
                local_ranks(own.rank, pool.tp - 1, compute_environment(pool))
            )
            worker = await Worker.start(own, worker_id="local", ranks=ranks, listens=False)
            scope.push_async_callback(worker.stop)
            engine = cls(worker, tokenizer, config, generation_defaults(config, folder))
            scope.push_async_callback(engine._dispatcher.close)
            watch = asyncio.create_task(engine._watch())
            scope.callback(watch.cancel)
            engine._scope = scope.pop_all()
        return engine

    async def close(self) -> None:
        """Ends all requests, the worker and its ranks. Idempotent."""
        await self._scope.aclose()

    async def prepare(self, request: inference_pb2.GenerateRequest) -> PreparedRequest:
        """Checks and tokenizes a request. Raises InvalidArgument, NotFound for another model's
        name, and InternalError once the engine has failed.
        """
        self._check_failed()
        return await self.service.accept(request, RequestContext(arrived=time.monotonic()))

    async def use_adapter(self, request: LoRARequest) -> str:
        """Returns the model's name by which requests choose an adapter. Raises InvalidArgument."""
        name, known = request.lora_name, self._adapters.get(request.lora_name)
        if name in self._model_names:
            raise InvalidArgument(f"{name!r} is the name of the model", "lora_request")
        if known is None or known.folder != str(request.folder):
            read = partial(named_adapter, self._max_lora_rank, "lora_request", name, request.folder)
            adapter = await asyncio.to_thread(read)
            self._adapters.put(adapter)
        return name

    async def messages(
        self, request: PreparedRequest, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields what `GenerationService.run` does. Raises InternalError once the engine has
        failed.
        """
        self._check_failed()  # the request would wait for another worker
        try:
            with tandem_errors_only():
                async with aclosing(self.service.run(request, timeline)) as messages:
                    async for message in messages:
                        yield message
        except TandemError as error:
            if self._worker.failed.is_set():
                raise InternalError(_FAILED) from error
            raise

    async def complete(self, request: PreparedRequest) -> Completion:
        """Returns the whole completion of a prepared request."""
        collector, timeline = Collector(), inference_pb2.Timeline()
        async with aclosing(self.messages(request, timeline)) as messages:
            async for message in messages:
                collector.delta(message)
        collector.timeline = timeline
        return collector.completion()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """Continues a text or token ids, as an AsyncClient does."""
        return await self.complete(
            await self.prepare(generate_request(text_prompt(prompt), options))
        )

    async def tokenize(self, prompt: str, *, model: str = "") -> list[int]:
        """Returns the token ids that `generate` sees for a text."""
        return list(
            (await self.service.tokenize(tokenize_request(prompt, model, {}), Caller())).token_ids
        )

    async def list_models(self) -> list[ModelInfo]:
        """Returns the one model."""
        return list((await self.service.list_models(inference_pb2.ListModelsRequest())).models)

    async def status(self) -> worker_pb2.GetStatusResponse:
        """Returns what the worker holds, and whether its blocks are intact."""
        return await self._worker.status()

    def _check_failed(self) -> None:
        if self._worker.failed.is_set():
            raise InternalError(_FAILED)

    async def _watch(self) -> None:
        """Ends all requests once the engine has failed or hangs."""
        while not self._worker.failed.is_set():
            with suppress(RuntimeError):
                self._worker.check_health()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_SECONDS):
                    await self._worker.failed.wait()
        self._dispatcher.stop()
