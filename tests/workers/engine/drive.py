"""One engine, driven by hand: short ways to submit, to run and to read events."""

from collections.abc import Sequence
from typing import Any, Protocol

from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.engine.harness import VOCAB_SIZE, SeqEvent, Worker, engine_config
from tandem.tests.workers.spans import read_now, span
from tandem.workers.engine.events import Admitted, Event, NewTokens
from tandem.workers.engine.plan import FirstTokens, SamplingParams
from tandem.workers.engine.sequence import (
    BeamSearch,
    FinishReason,
    PrefixRetention,
    SequenceSpec,
    Task,
    Turn,
)

PROMPT = tuple(range(1, 11))


class MakeWorker(Protocol):
    def __call__(self, **config: Any) -> Worker: ...


def make_worker(*, late: bool = False, **config: Any) -> Worker:
    return Worker(
        engine_config(**({"num_blocks": 32, "block_size": 4, "chunk_tokens": 16} | config)),
        late=late,
    )


def spec(
    number: int,
    tokens: tuple[int, ...] = PROMPT,
    *,
    task: Task = Task.COLOCATED,
    max_tokens: int = 4,
    first_index: int = 0,
    stop_ids: tuple[int, ...] = (),
    salt: bytes = b"",
    sampling: SamplingParams = SamplingParams(temperature=0.5),
    num_choices: int = 1,
    beam: BeamSearch | None = None,
    priority: int = 0,
    turn: Turn = Turn.BY_INDEX,
    tenant: bytes = b"",
    retentions: tuple[PrefixRetention, ...] = (),
) -> SequenceSpec:
    return SequenceSpec(
        id=number,
        task=task,
        tokens=tokens,
        max_tokens=max_tokens,
        first_index=first_index,
        sampling=sampling,
        num_choices=num_choices,
        beam=beam,
        stop_ids=frozenset(stop_ids),
        priority=priority,
        turn=turn,
        salt=salt,
        tenant=tenant,
        retentions=retentions,
    )


def first_tokens(*tokens: int) -> FirstTokens:
    return FirstTokens(tokens=tokens)


def expected(tokens: tuple[int, ...], count: int) -> list[int]:
    return expected_tokens(tokens, count, VOCAB_SIZE)


def fill(
    target: Worker, admitted: Admitted, tokens: tuple[int, ...], source: Worker | None = None
) -> int:
    """Prefills `tokens` elsewhere and copies what `target` lacks of their KV cache; returns the
    first token.
    """
    source = source or make_worker()
    source.submit(spec(1, tokens, task=Task.PREFILL))
    events = run(source)
    held = next(event for event in events if isinstance(event, Admitted))
    start, count = admitted.num_cached, len(tokens) - admitted.num_cached
    if count:
        part = span(source.executor.kv, start, count)
        target.executor.kv.write(
            admitted.tables[0].blocks,
            part,
            read_now(source.executor.kv, held.tables[0].blocks, part),
        )
    source.engine.cancel(1)
    source.check_idle()
    (first,) = tokens_of(events, 1)
    return first


def run(target: Worker, max_steps: int = 100) -> list[SeqEvent]:
    """Steps until there is no work."""
    events: list[SeqEvent] = []
    for _ in range(max_steps):
        if not target.engine.has_work:
            return events
        events += target.step()
    raise AssertionError("the engine does not come to rest")


def tokens_of(events: Sequence[Event], number: int) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, NewTokens) and event.id == number
        for token in event.token_ids
    ]


def finish_of(events: Sequence[Event], number: int) -> list[FinishReason]:
    return [
        e.finish
        for e in events
        if isinstance(e, NewTokens) and e.id == number and e.finish is not None
    ]


def cached_of(events: Sequence[Event], number: int) -> int:
    return next(
        event.num_cached for event in events if isinstance(event, Admitted) and event.id == number
    )
