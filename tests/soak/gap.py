"""Measures how long streams stand still when their decode worker is killed, and in which stage.

    python -m tandem.tests.soak.gap --kills 20
    python -m tandem.tests.soak.gap --model FOLDER  # random prompts to another model

Runs workers with the demo model in bfloat16 as processes, and a dispatcher with its admission in
this one, without Ray and without API servers, whose part is milliseconds. Streams with long prompts
run all the time; whenever all decode workers are there and have streams, one of them is killed, and
another process takes its place. Every stream must end with the tokens of a run without faults.
Exits with 1 otherwise, or if the gap's p99 is above `--limit`.
"""

import argparse
import asyncio
import base64
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tandem.proto import inference_pb2, worker_pb2
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.worker_client import WorkerClient, WorkerStream
from tandem.router.scheduling.admission import Admission
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.tests import demo_model
from tandem.tests.matrix.nodes import Launcher, launched
from tandem.tests.peers import IDENTITY
from tandem.tests.token_request import token_request
from tandem.workers.engine.config import default_chunk_tokens
from tandem.workers.model.config import read_fields, text_fields

STAGES: Final = ("noticed", "its turn", "queue", "prefill", "KV cache", "decode")
"""Of the time from the last token before the kill to the next one: until the session breaks; until
the request is sent to a worker again; until that begins; until it has the token. The last two are
of streams whose KV cache another worker still has. The first token comes from the prefill worker,
so that `handed over`, up to the second one, is a gap by itself.
"""

_NEXT_STAGE: Final = {
    "lost": "noticed",
    "submit": "its turn",
    "admitted": "queue",
    "kv": "KV cache",
}
_PREFILL_NICE: Final = 10  # as in a service
_STREAM_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Event:
    """Describes what the router sent or got for a request."""

    at: float
    kind: str  # submit, admitted, token, kv, lost
    is_decode: bool  # of a worker that fetches the KV cache
    worker_id: str
    num_tokens: int = 0  # of a submit; of an admission those that were cached


@dataclass(frozen=True, slots=True)
class Gap:
    """Describes one interruption of a stream that had tokens."""

    stages: dict[str, float]
    handed_over: float  # from the first to the second token after it
    num_computed: int  # tokens, for the first one after it

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def longest(self) -> float:
        """Returns the longest time without a token."""
        return max(self.seconds, self.handed_over)


@dataclass
class Measured:
    """Collects what a run shows."""

    gaps: list[Gap] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)  # gap of each stream
    num_tokens: int = 0
    num_running: Counter[str] = field(default_factory=Counter)  # by decode worker
    failed: list[str] = field(default_factory=list)
    num_altered: int = 0
    events: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))  # by request

    def report(self) -> str:
        rows = [f"{'':14}{'p50':>8}{'p99':>8}{'max':>8}  share"]
        rows.append(_row("gap", [gap.seconds for gap in self.gaps]))
        total = sum(gap.seconds for gap in self.gaps) or 1.0
        for stage in STAGES:
            if seconds := [gap.stages[stage] for gap in self.gaps if stage in gap.stages]:
                rows.append(
                    f"{_row('  ' + stage, seconds)}  {sum(seconds) / total:.0%} ({len(seconds)})"
                )
        rows.append(_row("handed over", [gap.handed_over for gap in self.gaps]))
        rows.append(_row("computed", [gap.num_computed for gap in self.gaps]))  # tokens
        rows.append(_row("every stream", self.longest))  # interrupted or not, and all its gaps
        lines = [
            f"{len(self.longest)} streams, {self.num_tokens} tokens, {len(self.gaps)} "
            "interruptions",
            *rows,
        ]
        lines += [f"failed {len(self.failed)}, altered {self.num_altered}", *self.failed[:8]]
        return "\n".join(lines)


@contextmanager
def recording(events: dict[str, list[Event]]) -> Iterator[None]:
    """Has each event of a request appended, as the router sees it."""
    submit, put, fail = WorkerClient.submit, WorkerStream.put, WorkerStream.fail

    def note(stream: WorkerStream, kind: str, num_tokens: int = 0) -> None:
        event = Event(
            time.monotonic(), kind, not stream._computes_prompt, stream.worker[0], num_tokens
        )
        events[stream._key[0]].append(event)

    def noted_submit(
        self: WorkerClient, message: worker_pb2.Submit, wake: asyncio.Event
    ) -> WorkerStream:
        stream = submit(self, message, wake)
        note(stream, "submit", len(message.token_ids))
        return stream

    def noted_put(self: WorkerStream, output: worker_pb2.Output) -> bool:
        kind = output.WhichOneof("event")
        name = {"tokens": "token", "kv_received": "kv", "failure": "lost"}.get(str(kind), str(kind))
        note(self, name, output.admitted.cached_tokens)
        return put(self, output)

    def noted_fail(self: WorkerStream, *args: Any) -> None:
        if self.failure is None:
            note(self, "lost")
        fail(self, *args)

    with ExitStack() as stack:
        for owner, name, function in (
            (WorkerClient, "submit", noted_submit),
            (WorkerStream, "put", noted_put),
            (WorkerStream, "fail", noted_fail),
        ):
            stack.enter_context(patch.object(owner, name, function))
        yield


def gaps_of(events: Sequence[Event]) -> Iterator[Gap]:
    """Yields the interruptions of a stream after its first token."""
    last = 0.0  # when it got its last token
    for index, event in enumerate(events):
        if event.kind == "token":
            last = event.at
        elif event.kind == "lost" and last:
            gap = _gap(events[index:], last)
            if gap is not None:
                yield gap
                last = 0.0  # what follows until the next token belongs to it


def _gap(events: Sequence[Event], last: float) -> Gap | None:
    """Returns the gap that begins with the first event, after a token at `last`; None if no token
    follows.
    """
    tokens = [number for number, event in enumerate(events) if event.kind == "token"]
    if not tokens:
        return None
    until = events[: tokens[0] + 1]
    is_replayed = any(event.kind == "submit" and not event.is_decode for event in until)
    stages: dict[str, float] = defaultdict(float)
    for event in until:
        if is_replayed and event.is_decode and event.kind not in ("lost", "token"):
            continue  # meanwhile, at the worker that will fetch the KV cache
        stage = _NEXT_STAGE.get(event.kind, "prefill" if is_replayed else "decode")
        stages[stage] += event.at - last
        last = event.at
    after = events[tokens[1]].at - last if len(tokens) > 1 else 0.0
    computing = [event for event in until if not event.is_decode]
    num_sent = sum(event.num_tokens for event in computing if event.kind == "submit")
    num_cached = sum(event.num_tokens for event in computing if event.kind == "admitted")
    return Gap(dict(stages), after, num_sent - num_cached)


class Pools:
    """Holds the workers that live, and what the directory would list."""

    def __init__(self, launcher: Launcher, folder: str, options: argparse.Namespace) -> None:
        self.registry = WorkerRegistry(local_prefill_tokens=64)
        self.pids: dict[str, int] = {}
        self._launcher = launcher
        self._folder = folder
        self._threads = options.threads
        self._infos: dict[str, worker_pb2.WorkerInfo] = {}

    async def start(self, role: str) -> None:
        """Starts one more worker."""
        nice = _PREFILL_NICE if role == "prefill" else 0
        config = {
            "model": self._folder,
            "kv_cache_bytes": 2**29,
            "num_threads": self._threads,
            "nice": nice,
        }
        config |= {
            "chunk_tokens": default_chunk_tokens("cpu", self._threads),
            "mixed_chunk_tokens": 32,
        }
        worker_id = f"{role}-{len(self._infos)}-{time.monotonic_ns()}"
        absent = dict.fromkeys(("control", "kv_address", "router_address"))
        found = await self._launcher.start(
            kind="worker",
            config=config,
            worker_id=worker_id,
            role=role,
            ranks=[],
            hooks=[],
            **absent,
        )
        self._infos[worker_id] = worker_pb2.WorkerInfo.FromString(base64.b64decode(found["info"]))
        self.pids[worker_id] = found["pid"]
        self.registry.update(self._infos.values())

    async def replace(self, worker_id: str) -> None:
        """Kills a worker and starts another. The directory lists the dead one meanwhile."""
        os.kill(self.pids.pop(worker_id), signal.SIGKILL)
        await self.start("decode")
        del self._infos[worker_id]
        self.registry.update(self._infos.values())

    def close(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)


async def stream(
    dispatcher: Dispatcher,
    measured: Measured,
    prompt: Sequence[int],
    name: str,
    options: argparse.Namespace,
) -> list[int]:
    """Reads one stream, whose prompt no prefix cache has; returns its tokens."""
    request = token_request(
        prompt, options.tokens, name=name, ignore_eos=True, cache_salt=name.encode()
    )
    ids: list[int] = []
    last = longest = 0.0
    timeline, on = inference_pb2.Timeline(), ""
    try:
        async with (
            asyncio.timeout(_STREAM_SECONDS),
            aclosing(dispatcher.generate(request, timeline)) as deltas,
        ):
            async for delta in deltas:
                now = time.monotonic()
                longest, last = max(longest, now - last if last else 0.0), now
                ids += delta.ids
                if timeline.decode_worker != on:
                    measured.num_running[on] -= 1
                    on = timeline.decode_worker
                    measured.num_running[on] += 1
    except Exception as error:
        measured.failed.append(f"{name}: {type(error).__name__} {error} after {len(ids)} tokens")
    measured.num_running[on] -= 1
    measured.longest.append(longest)
    measured.num_tokens += len(ids)
    return ids


async def keep_going(
    dispatcher: Dispatcher,
    measured: Measured,
    expected: dict[tuple[int, ...], list[int]],
    is_over: Callable[[], bool],
    options: argparse.Namespace,
) -> None:
    """Runs streams one after the other until it is over."""
    chance = random.Random(time.monotonic_ns())
    await asyncio.sleep(chance.uniform(0, 2))  # so that they do not end together
    while not is_over():
        prompt = chance.choice(list(expected))
        name, num_failed = f"stream-{time.monotonic_ns()}", len(measured.failed)
        ids = await stream(dispatcher, measured, prompt, name, options)
        if len(measured.failed) > num_failed:
            await asyncio.sleep(1)  # who is refused at once leaves the event loop to the others
        measured.num_altered += ids != expected[prompt] and not any(
            name in text for text in measured.failed
        )
        measured.gaps += gaps_of(measured.events.pop(name, []))


async def strike(pools: Pools, measured: Measured, options: argparse.Namespace) -> None:
    """Kills decode workers, each the one with the most streams, when all of them have had time to
    fill.
    """
    for number in range(options.kills):
        await asyncio.sleep(options.period)
        victim = max(
            (each for each in pools.pids if each.startswith("decode")),
            key=measured.num_running.__getitem__,
        )
        began, num_streams = time.monotonic(), measured.num_running[victim]
        await pools.replace(victim)
        seconds = time.monotonic() - began
        print(
            f"kill {number + 1}: {num_streams} streams; another worker after {seconds:.1f} s",
            flush=True,
        )


async def run(options: argparse.Namespace) -> Measured:
    """Runs everything; returns what was measured."""
    measured = Measured()
    lengths = [options.prompt + number for number in range(-4, 4)]
    async with launched() as launcher:
        pools = Pools(launcher, options.model or str(demo_model.folder()), options)
        try:
            await asyncio.gather(
                *(pools.start(role) for role in ("prefill", "decode") for _ in range(2))
            )
            dispatcher = Dispatcher(pools.registry, Admission(pools.registry), identity=IDENTITY)
            expected = {
                prompt: await stream(dispatcher, Measured(), prompt, f"alone-{number}", options)
                for number, prompt in enumerate(prompts(options.model, lengths))
            }
            print("without faults: done", flush=True)
            with recording(measured.events):
                killing = asyncio.create_task(strike(pools, measured, options))
                await asyncio.gather(
                    killing,
                    *(
                        keep_going(dispatcher, measured, expected, killing.done, options)
                        for _ in range(options.concurrency)
                    ),
                )
            await dispatcher.close()
        finally:
            pools.close()
    return measured


def prompts(folder: str | None, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns a prompt of each length: text for the demo model, random tokens for another one."""
    if folder is None:
        return demo_model.prompts(lengths)
    vocab_size = text_fields(read_fields(Path(folder))).integer("vocab_size")
    numbers = random.Random(11)
    return [tuple(numbers.choices(range(vocab_size), k=length)) for length in lengths]


def _row(name: str, seconds: Sequence[float]) -> str:
    if not seconds:
        return f"{name:14}{'-':>8}{'-':>8}{'-':>8}"
    cuts = _quantiles(seconds)
    return f"{name:14}{cuts[49]:8.3f}{cuts[98]:8.3f}{max(seconds):8.3f}"


def _quantiles(seconds: Sequence[float]) -> list[float]:
    return (
        statistics.quantiles(seconds, n=100, method="inclusive")
        if len(seconds) > 1
        else list(seconds) * 99
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.soak.gap", description=__doc__)
    parser.add_argument("--model", help="a folder; by default the demo model")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--period", type=float, default=4.0, help="seconds between a new worker and the next kill"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="streams at a time")
    parser.add_argument("--prompt", type=int, default=1_000, help="tokens")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--limit", type=float, default=1.0, help="of the gap's p99, in seconds")
    options = parser.parse_args(arguments)
    measured = asyncio.run(run(options))
    print(measured.report())
    is_within = (
        bool(measured.gaps)
        and _quantiles([gap.longest for gap in measured.gaps])[98] <= options.limit
    )
    passed = is_within and not measured.failed and not measured.num_altered
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
