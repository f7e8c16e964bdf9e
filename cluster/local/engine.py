"""Runs a worker and the work of a router in one event loop, for the process that holds them.

The parts are the same as in a service, but there is one worker, no server, and no bound on waiting
requests.
"""

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self, Unpack

from ...proto import inference_pb2, worker_pb2
from ...proto.errors import InternalError, InvalidArgument, TandemError
from ...proto.identity import PeerIdentity
from ...router.adapters import MAX_ADAPTERS, AdapterAdmin, AdapterRegistry
from ...router.api.service import GenerationService, tandem_errors_only
from ...router.auth.authenticator import Caller
from ...router.client.request import generate_request, text_prompt, tokenize_request
from ...router.client.results import Collector
from ...router.client.types import Completion, ModelInfo, Options
from ...router.dispatch.dispatcher import Dispatcher
from ...router.frontend.prepare import RequestContext
from ...router.frontend.prepared import PreparedRequest
from ...router.frontend.served_model import ServedModel
from ...router.frontend.tokenizer import Tokenizer
from ...router.scheduling.admission import Admission
from ...router.scheduling.registry import WorkerRegistry
from ...router.watermark.rules import WatermarkRules
from ...workers.model.adapter_folder import CONFIG_FILE, WEIGHTS_FILE
from ...workers.model.config import read_fields, text_model_of
from ...workers.serve.worker import Worker
from ..config import TandemConfig
from ..store.adapters import named_adapter
from ..store.generation_defaults import generation_defaults
from ..store.pooling import pooling_rules
from .environment import compute_environment
from .lora import LoRARequest
from .ranks import local_ranks
from .session import LocalChannel
from .worker import rank_threads, worker_config

_HOST: Final = "127.0.0.1"  # of ranks; a worker of one rank opens no port
_UNBOUNDED: Final = 1 << 40
_LONG_SECONDS: Final = 1e8
_HEALTH_SECONDS: Final = 1.0
_FAILED: Final = "the engine has failed; make a new one"
# By device, the time in which the step of a failed group must end. On CPUs a wait for another rank
# ends by the deadline of collectives. On GPUs a wait in a captured step has no deadline.
_STEP_SECONDS: Final = {"cpu": 60.0, "cuda": 5.0}

logger = logging.getLogger(__name__)


class LocalEngine:
    """Generates like a service. Made by `start`, ended by `close`; lives in one event loop."""

    def __init__(
        self,
        worker: Worker,
        model: ServedModel,
        config: TandemConfig,
    ) -> None:
        registry = WorkerRegistry()
        registry.update([worker.info()])
        admission = Admission(
            registry,
            max_queued_tokens=_UNBOUNDED,
            max_queued_requests=_UNBOUNDED,
            max_queue_seconds=_LONG_SECONDS,
        )
        self.defaults = model.defaults
        self._worker = worker
        self._adapters = AdapterRegistry()
        # By name, in the order of their last use, the state of the files when they were read.
        self._adapter_states: dict[str, tuple[object, ...]] = {}
        self._max_lora_rank = config.lora.max_lora_rank
        self._dispatcher = Dispatcher(
            registry,
            admission,
            identity=PeerIdentity.generate(),
            connect=lambda *_: LocalChannel(worker.serve_session),
        )
        adapters = AdapterAdmin(self._adapters)
        self._model_names = (*config.served_names, *config.aliases)
        self.service = GenerationService(
            [model],
            self._dispatcher,
            admission,
            adapters=adapters,
            names=config.served_names,
            aliases=config.aliases,
        )
        self.max_sequences = worker.info().max_sequences
        self._has_ranks = config.decode.tp > 1
        self._step_seconds = _STEP_SECONDS[config.device]
        self._scope = AsyncExitStack()

    @classmethod
    async def start(cls, config: TandemConfig, folder: Path) -> Self:
        """Loads the model in `folder` by `config.decode`; ranks 1 and up are other processes.

        Raises the errors of `Worker.start`, Unavailable if another rank does not start, and
        ValueError for a folder without a tokenizer and if there is no GPU for the device.
        """
        pool = config.decode
        async with AsyncExitStack() as scope:
            threads = rank_threads(pool.num_threads, pool.tp, 0)
            own = worker_config(
                config,
                "decode",
                str(folder),
                threads,
                PeerIdentity.generate(),
                host=_HOST,
                ranks_per_node=pool.tp,
            )
            # An idle process should not run test prompts, and its user may load an adapter from any
            # folder that the process can read.
            own = replace(
                own, canary_seconds=math.inf, rank=replace(own.rank, adapter_folders=("/",))
            )
            tokenizer = await asyncio.to_thread(
                Tokenizer.load,
                folder,
                config.tool_call_parser,
                config.reasoning_parser,
                config.chat_template,
                config.chat_template_kwargs,
            )
            ranks = await scope.enter_async_context(
                local_ranks(own.rank, pool.tp - 1, compute_environment(pool))
            )
            worker = await Worker.start(own, worker_id="local", ranks=ranks, listens=False)
            scope.push_async_callback(worker.stop)
            model = ServedModel(
                name=config.served_name,
                tokenizer=tokenizer,
                context_tokens=worker.info().context_tokens,
                text_model_of=text_model_of(read_fields(folder)),
                defaults=generation_defaults(config, folder),
                pooling=pooling_rules(folder),
                watermark=WatermarkRules.load(config.watermark),
            )
            engine = cls(worker, model, config)
            scope.push_async_callback(engine._dispatcher.close)
            watch = asyncio.create_task(engine._watch())
            scope.callback(watch.cancel)
            engine._scope = scope.pop_all()
        return engine

    async def close(self) -> None:
        """Ends all requests, the worker and its ranks. Idempotent."""
        await self._scope.aclose()

    async def prepare(self, request: inference_pb2.GenerateRequest) -> PreparedRequest:
        """Checks and tokenizes a request.

        Raises InvalidArgument, NotFound for another model's name, and InternalError after a failure
        of the engine.
        """
        self.check_failed()
        return await self.service.accept(request, RequestContext(arrived=time.monotonic()))

    async def use_adapter(self, request: LoRARequest) -> str:
        """Returns the model name that chooses an adapter in requests. Raises InvalidArgument.

        Reads an adapter whose files have changed again. Drops the least recently used adapter if
        there are too many.
        """
        name = request.lora_name
        if name in self._model_names:
            raise InvalidArgument(f"{name!r} is the name of the model", "lora_request")
        state = await asyncio.to_thread(_state_of, request)
        if self._adapter_states.get(name) != state:
            read = partial(named_adapter, self._max_lora_rank, "lora_request", name, request.folder)
            adapter = await asyncio.to_thread(read)
            if name not in self._adapter_states and len(self._adapter_states) >= MAX_ADAPTERS:
                oldest = next(iter(self._adapter_states))
                del self._adapter_states[oldest]
                self._adapters.remove(oldest)
            self._adapters.put(adapter)
        self._adapter_states.pop(name, None)
        self._adapter_states[name] = state
        return name

    async def messages(
        self, request: PreparedRequest, timeline: inference_pb2.Timeline
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the messages of `GenerationService.run`. The request's time begins now.

        Raises InternalError after a failure of the engine.
        """
        self.check_failed()  # otherwise the request would wait for another worker
        try:
            with tandem_errors_only():
                async with aclosing(self.service.run(_arriving_now(request), timeline)) as messages:
                    async for message in messages:
                        yield message
        except TandemError as error:
            if self._worker.failed.is_set():
                raise InternalError(_FAILED) from error
            raise

    async def complete(self, request: PreparedRequest) -> Completion:
        """Returns the completion of a prepared request."""
        collector = Collector()
        timeline = inference_pb2.Timeline()
        async with aclosing(self.messages(request, timeline)) as messages:
            async for message in messages:
                collector.delta(message)
        collector.timeline = timeline
        return collector.completion()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """Continues a text or token ids, like an AsyncClient."""
        request = generate_request(text_prompt(prompt), options)
        return await self.complete(await self.prepare(request))

    async def tokenize(self, prompt: str, *, model: str = "") -> list[int]:
        """Returns the token ids of a text in `generate`."""
        request = tokenize_request(prompt, model, {})
        answer = await self.service.tokenize(request, Caller())
        return list(answer.token_ids)

    async def list_models(self) -> list[ModelInfo]:
        """Returns the one model."""
        return list((await self.service.list_models(inference_pb2.ListModelsRequest())).models)

    async def status(self) -> worker_pb2.GetStatusResponse:
        """Returns the state of the worker, and the result of its integrity check."""
        return await self._worker.status()

    def check_failed(self) -> None:
        """Raises InternalError after a failure of the engine."""
        if self._worker.failed.is_set():
            raise InternalError(_FAILED)

    async def _watch(self) -> None:
        """Ends all requests when the engine fails or hangs."""
        while not self._worker.failed.is_set():
            with suppress(RuntimeError):
                self._worker.check_health()
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEALTH_SECONDS):
                    await self._worker.failed.wait()
        self._dispatcher.stop()
        if self._has_ranks:
            # A thread, which `close` does not end.
            threading.Thread(
                target=_exit_unless_ended,
                args=(self._worker, self._step_seconds),
                name="tandem-exit",
                daemon=True,
            ).start()


def _state_of(request: LoRARequest) -> tuple[object, ...]:
    """Returns a value that changes when the request names another adapter, or its files change."""
    found: list[object] = [request.lora_int_id, request.folder]
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with suppress(OSError, ValueError):  # reading the adapter raises an error
            stat = (request.folder / name).stat()
            found.append((name, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _arriving_now(request: PreparedRequest) -> PreparedRequest:
    """Returns the request as if it had just arrived.

    All prompts of a call are prepared before the first runs, so `max_time_ms` of an early one could
    pass before it starts.
    """
    tokens = request.tokens
    now = time.monotonic()
    ends_at = None if tokens.ends_at is None else now + tokens.ends_at - tokens.arrived
    return replace(request, tokens=replace(tokens, arrived=now, ends_at=ends_at))


def _exit_unless_ended(worker: Worker, seconds: float) -> None:
    """Ends this process, as a service does, if the step of a failed engine does not end in time.

    A captured step on a GPU may wait for a lost rank for ever. Nothing in this process can end it
    or free the memory of the GPU.
    """
    if worker.end_engine(seconds):
        return
    logger.critical(
        "the engine has failed, and its step has not ended within %g seconds; this process exits "
        "with status 1",
        seconds,
    )
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
