"""One router's stream into a worker: its jobs, and the outputs that wait to go up."""

import asyncio
from dataclasses import dataclass, field

from ..proto import inference_pb2, limits, worker_pb2
from .engine.events import Token
from .engine.plan import KvLayout, SamplingParams
from .engine.sequence import FinishReason, SequenceSpec, Task
from .transfer.pull import Fetched, Target

JobKey = tuple[str, int]  # request id, attempt

_TASKS = {
    worker_pb2.TASK_WHOLE: Task.WHOLE,
    worker_pb2.TASK_PREFILL: Task.PREFILL,
    worker_pb2.TASK_DECODE: Task.DECODE,
}
_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InvalidSubmit(Exception):
    """A submit that breaks a bound; the text is safe to show."""


@dataclass(slots=True, eq=False)
class Job:
    """One submit that a worker has accepted and not yet ended."""

    spec: SequenceSpec
    session: "RouterSession"
    key: JobKey
    target: asyncio.Future[Target] | None = None  # DECODE: set at admission
    pulling: asyncio.Task[None] | None = None  # DECODE: until the cache has arrived
    fetched: Fetched | None = None


@dataclass(slots=True, eq=False)
class RouterSession:
    """The jobs of one stream. Outputs gather here and leave as one message a step."""

    jobs: dict[JobKey, Job] = field(default_factory=dict)
    _pending: list[worker_pb2.Output] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: bool = False

    def put(self, key: JobKey, **event: object) -> None:
        """Queues one output, `admitted=`, `tokens=`, `joined=` or `failure=`."""
        self._pending.append(worker_pb2.Output(request_id=key[0], attempt=key[1], **event))  # type: ignore[arg-type]
        self._ready.set()

    def close(self) -> None:
        """No more outputs: `take` returns None once the queued ones have gone."""
        self._closed = True
        self._ready.set()

    async def take(self) -> list[worker_pb2.Output] | None:
        """All outputs queued by now, waiting for the first; None when the session is closed."""
        await self._ready.wait()
        if not self._closed:
            self._ready.clear()
        taken, self._pending = self._pending, []
        return taken or (None if self._closed else [])


def parse_submit(
    submit: worker_pb2.Submit, sequence_id: int, *, vocab_size: int, context_tokens: int, eos_ids: frozenset[int]
) -> SequenceSpec:
    """A submit as the engine takes it. Raises InvalidSubmit; the worker trusts no router to have checked."""
    task = _TASKS.get(submit.task)
    if task is None:
        raise InvalidSubmit("task: unknown")
    if not submit.token_ids or max(submit.token_ids) >= vocab_size:
        raise InvalidSubmit(f"token_ids: at least one, each below {vocab_size}")
    if submit.max_tokens < 1 or len(submit.token_ids) + submit.max_tokens > context_tokens:
        raise InvalidSubmit(f"max_tokens: at least 1, and with the prompt at most {context_tokens}")
    if task is Task.DECODE and (not submit.kv.endpoints or submit.kv.num_tokens != len(submit.token_ids)):
        raise InvalidSubmit("kv: does not name the cache of this prompt")
    if submit.first_index >= len(submit.token_ids):
        raise InvalidSubmit("first_index: below the number of token_ids")
    if len(submit.stop_token_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidSubmit(f"stop_token_ids: at most {limits.MAX_STOP_TOKEN_IDS}")
    if len(submit.cache_salt) > limits.MAX_CACHE_SALT_BYTES:
        raise InvalidSubmit(f"cache_salt: at most {limits.MAX_CACHE_SALT_BYTES} bytes")
    stop_ids = frozenset(submit.stop_token_ids) | (frozenset() if submit.ignore_eos else eos_ids)
    return SequenceSpec(
        id=sequence_id,
        task=task,
        tokens=tuple(submit.token_ids),
        first_index=submit.first_index,
        max_tokens=submit.max_tokens,
        sampling=_parse_sampling(submit.sampling, vocab_size),
        stop_ids=stop_ids,
        salt=submit.cache_salt,
    )


def _parse_sampling(sampling: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises InvalidSubmit for a value that the sampler could not take; comparisons are false for NaN."""
    if not 0 <= sampling.temperature <= limits.MAX_TEMPERATURE:
        raise InvalidSubmit(f"sampling.temperature: between 0 and {limits.MAX_TEMPERATURE:g}")
    if not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise InvalidSubmit("sampling.top_p, min_p: between 0 and 1")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=min(max(sampling.top_k, 0), vocab_size),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def tokens_output(event: Token) -> worker_pb2.Tokens:
    """A generated token as it goes up the session."""
    return worker_pb2.Tokens(
        first_index=event.index,
        ids=[event.token],
        finish_reason=_FINISH[event.finish],
        prefill_seconds=event.prefill_seconds,
    )


def layout_message(layout: KvLayout) -> worker_pb2.KvLayout:
    """A KV layout as handles and the directory carry it."""
    return worker_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        model=layout.model,
    )


def parse_layout(message: worker_pb2.KvLayout) -> KvLayout:
    """The inverse of `layout_message`."""
    return KvLayout(
        num_layers=message.num_layers,
        num_heads=message.num_heads,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
        model=message.model,
    )
