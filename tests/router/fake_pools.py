"""Pools of fake workers without a network, in which one request runs: every token depends on all
before it.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.metrics import NULL_METRICS
from tandem.router.dispatch.execution import PARK_SECONDS, RequestExecution
from tandem.router.dispatch.poison_guard import PoisonGuard
from tandem.router.dispatch.request_timer import RequestTimer
from tandem.router.dispatch.worker_client import AttemptKey, WorkerClient, WorkerStream
from tandem.router.request import TokenDelta, TokenRequest
from tandem.router.scheduling.policy import Placement
from tandem.tests.token_request import token_request

SEED = 1000
UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED


def next_token(seed: int, history: tuple[int, ...]) -> int:
    return random.Random(repr((seed, history))).randrange(1, 100)


def finish_of(token: int, num_left: int) -> "inference_pb2.FinishReason":
    if token % 13 == 0:
        return inference_pb2.FINISH_REASON_STOP
    return inference_pb2.FINISH_REASON_LENGTH if num_left == 0 else UNFINISHED


def completion(prompt: Iterable[int], seed: int, max_tokens: int) -> list[int]:
    ids: list[int] = []
    while not ids or finish_of(ids[-1], max_tokens - len(ids)) == UNFINISHED:
        ids.append(next_token(seed, (*prompt, *ids)))
    return ids


class OneMessage:
    """A session that ends after one message."""

    def __init__(self, message: worker_pb2.SessionResponse) -> None:
        self._messages = [message]

    async def read(self) -> worker_pb2.SessionResponse | None:
        return self._messages.pop() if self._messages else None


class FakeClient(WorkerClient):
    """A client without a session."""

    def __init__(self, worker_id: str, epoch: int) -> None:
        self.worker = (worker_id, epoch)
        self._streams = {}
        self.broken = False
        self._commands = asyncio.Queue()
        self._on_message = lambda client, message: None
        self._on_break = lambda client: None
        self._room_elsewhere = lambda: 0
        self._drains = False
        self._told = set()
        self.cancelled: set[int] = set()  # numbers of attempts

    def cancel(self, key: AttemptKey, choice: int | None = None) -> None:
        if choice is None and key in self._streams:
            self.cancelled.add(key[1])
        super().cancel(key, choice)

    def greet(self) -> None:
        """The worker's first message, which comes before it reads a command."""
        self.receive()

    def receive(self, *outputs: worker_pb2.Output) -> None:
        call: Any = OneMessage(worker_pb2.SessionResponse(outputs=outputs))
        with suppress(StopIteration):  # nothing is awaited that is not there
            self._receive(call).send(None)

    def kill(self) -> None:
        self._break()
        self._streams.clear()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def holds(self, submit: worker_pb2.Submit) -> bool:
        return (submit.request_id, submit.attempt) in self._streams

    def cancels(self) -> list[worker_pb2.Cancel]:
        commands = [self._commands.get_nowait() for _ in range(self._commands.qsize())]
        return [command.cancel for command in commands if command.HasField("cancel")]


def outputs_of(submit: worker_pb2.Submit) -> Iterator[worker_pb2.Output]:
    """What a worker sends for a submit, one by one."""

    def output(choice: int = 0, **event: Any) -> worker_pb2.Output:
        return worker_pb2.Output(
            request_id=submit.request_id, attempt=submit.attempt, choice=choice, **event
        )

    handle = worker_pb2.KvHandle(transfer_id=b"%d" % submit.attempt)
    yield output(admitted=worker_pb2.Admitted(cached_tokens=1, kv=handle))
    histories = {
        choice: tuple(submit.token_ids)
        for choice in range(submit.first_choice, submit.first_choice + submit.num_choices)
    }
    if submit.task == worker_pb2.TASK_DECODE:
        yield output(
            kv_received=worker_pb2.KvReceived(transfer_bytes=10, transfer_active_seconds=0.1)
        )
    for step in range(submit.max_tokens):
        for choice, history in list(histories.items()):
            token = next_token(submit.sampling.seed + choice, history)
            finish = finish_of(token, submit.max_tokens - step - 1)
            is_first = step == 0 and choice == submit.first_choice
            tokens = worker_pb2.Tokens(
                first_index=submit.first_index + step, ids=[token], finish_reason=finish
            )
            tokens.prefill_seconds = 0.5 if is_first else 0.0
            if is_first and submit.HasField("prompt_logprobs"):
                tokens.prompt_logprobs.extend(
                    worker_pb2.TokenScores() for _ in submit.token_ids[1:]
                )
            histories[choice] = (*history, token)
            if finish != UNFINISHED:
                del histories[choice]
            if submit.task != worker_pb2.TASK_DECODE or step:
                yield output(choice, tokens=tokens)
        if submit.task == worker_pb2.TASK_PREFILL:
            return


@dataclass(eq=False)
class Submitted:
    """A submit and the outputs that its worker still has to send."""

    worker: str
    submit: worker_pb2.Submit
    client: FakeClient
    outputs: Iterator[worker_pb2.Output]
    begun: bool = False  # the prompt is computed, or the KV cache received


@dataclass
class FakePools:
    """Workers, the registry of them and the one request."""

    chance: random.Random
    pairs: bool
    decode: tuple[str, ...] = ("d1", "d2", "d3", "d4")
    prefill: tuple[str, ...] = ("p1", "p2", "p3", "p4")
    clients: dict[str, FakeClient] = field(default_factory=dict)
    epochs: Counter[str] = field(default_factory=Counter)
    running: list[Submitted] = field(default_factory=list)
    submits: list[worker_pb2.Submit] = field(default_factory=list)
    held: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # what the registry counts as dispatched
    sources: dict[bytes, Submitted] = field(default_factory=dict)  # prefills, by transfer id
    prefilled_tokens: list[int] = field(default_factory=list)
    num_transfers: int = 0
    left: set[str] = field(default_factory=set)
    hosts: dict[str, str] = field(default_factory=dict)  # by worker
    subscribers: list[Callable[[], object]] = field(default_factory=list)
    unavailable_message = "no worker is ready"

    # --- what the execution calls ---

    def send(self, worker_id: str, submit: worker_pb2.Submit) -> WorkerStream | None:
        if worker_id in self.left:
            self.left.clear()
            return None
        client = self.clients.get(worker_id)
        if client is None or client.broken:
            self.epochs[worker_id] += 1
            client = self.clients[worker_id] = FakeClient(worker_id, self.epochs[worker_id])
        submitted = Submitted(worker_id, submit, client, outputs_of(submit))
        self.submits.append(submit)
        self.running.append(submitted)
        if submit.task == worker_pb2.TASK_PREFILL:
            self.sources[b"%d" % submit.attempt] = submitted
        return client.submit(submit, asyncio.Event())

    def get(self, worker_id: str) -> None:
        """Returns no entry of the directory: these workers never have a new epoch."""

    def host(self, worker_id: str) -> str:
        """Returns the machine of a worker; by default each has its own."""
        return self.hosts.get(worker_id, worker_id)

    def replaceable(self, hosts: Collection[str]) -> set[str]:
        workers = (*self.prefill, *self.decode)
        roles = {worker_id[0] for worker_id in workers if self.host(worker_id) not in hosts}
        return {each for each in workers if each[0] in roles and self.host(each) in hosts}

    def place(
        self,
        request: TokenRequest,
        avoid: Collection[str] = (),
        *,
        prefill: str | None = None,
        colocated: bool = False,
        is_recovery: bool = False,
    ) -> Placement | None:
        free = [name for name in self.decode if name not in avoid]
        sources = [name for name in self.prefill if name not in avoid]
        if not free:
            return None
        if self.pairs and prefill is None and not colocated:
            prefill = self.chance.choice(sources)
        return Placement(prefill=prefill, decode=self.chance.choice(free))

    @property
    def capacity(self) -> "FakePools":
        return self

    def subscribe(self, on_free: Callable[[], object]) -> Callable[[], None]:
        self.subscribers.append(on_free)
        return partial(self.subscribers.remove, on_free)

    def release(self, request_id: str) -> bool:
        """Returns False: there are no reservations without an admission."""
        return False

    def find_holder(self, request: TokenRequest, prefill: str) -> worker_pb2.PrefixHolder | None:
        assert not self.held[prefill, request.request_id], "it counts as dispatched already"
        return None

    def dispatched(
        self,
        worker_id: str,
        request: TokenRequest,
        num_tokens: int,
        *,
        decodes: bool = False,
        is_recovery: bool = False,
        fetched_tokens: int = 0,
    ) -> None:
        self.held[worker_id, request.request_id] = 1

    def prefilled(self, worker_id: str, request_id: str) -> None:
        assert self.held[worker_id, request_id]

    def ended(self, worker_id: str, request_id: str) -> None:
        self.held.pop((worker_id, request_id), None)

    def record_prefill(self, worker_id: str, num_tokens: int, seconds: float) -> None:
        assert seconds == 0.5
        self.prefilled_tokens.append(num_tokens)

    def record_transfer(
        self, prefill_worker: str, decode_worker: str, num_bytes: int, seconds: float
    ) -> None:
        assert (prefill_worker[0], decode_worker[0], num_bytes) == ("p", "d", 10)
        self.num_transfers += 1

    # --- what the workers do ---

    def advance(self) -> None:
        """A random worker that is alive sends its next outputs."""
        alive = [one for one in self.running if not one.client.broken]
        if alive:
            self.step(self.chance.choice(alive), self.chance.randrange(1, 6))

    def step(self, one: Submitted, count: int = 1) -> None:
        """The worker of one submit sends its next outputs."""
        for _ in range(count):
            if (output := next(one.outputs, None)) is None:
                self.running.remove(one)
                return
            if output.HasField("kv_received") and not self._receives_kv(one):
                return
            one.begun |= output.WhichOneof("event") in ("tokens", "kv_received")
            one.client.receive(output)

    def _receives_kv(self, one: Submitted) -> bool:
        """Whether the prefill worker holds the KV cache still, which the router may not cancel
        before. If not, the transfer fails.
        """
        source = self.sources[one.submit.kv.transfer_id]
        if source.client.holds(source.submit) and not source.client.broken:
            return True
        assert not (
            source.submit.attempt in source.client.cancelled and one.client.holds(one.submit)
        )
        self.fail(one, worker_pb2.FAILURE_KIND_TRANSFER)
        self.running.remove(one)
        return False

    def fail(
        self,
        one: Submitted,
        kind: "worker_pb2.FailureKind",
        choice: int = 0,
        message: str = "because",
    ) -> None:
        failure = worker_pb2.Failure(kind=kind, message=message)
        one.client.receive(
            worker_pb2.Output(
                request_id=one.submit.request_id,
                attempt=one.submit.attempt,
                choice=choice,
                failure=failure,
            )
        )

    def strike(self, kind: str) -> None:
        """Injects a fault of a kind into a random submit that is alive."""
        alive = [one for one in self.running if not one.client.broken]
        if not alive:
            return
        one = self.chance.choice(alive)
        match kind:
            case "kill":
                one.client.kill()
            case "transfer":
                self.fail(one, worker_pb2.FAILURE_KIND_TRANSFER)
                self.running.remove(one)
            case "full":
                self.fail(one, worker_pb2.FAILURE_KIND_FULL)
                self.running.remove(one)
            case "not_finite":
                self.fail(one, worker_pb2.FAILURE_KIND_NOT_FINITE)
                self.running.remove(one)
            case "unable":
                self.fail(one, worker_pb2.FAILURE_KIND_UNABLE)
                self.running.remove(one)
            case "preempt":
                # A prefill with its first token is leased, and a decode without its KV cache has
                # not begun.
                if one.submit.task != worker_pb2.TASK_COLOCATED and one.begun == (
                    one.submit.task == worker_pb2.TASK_PREFILL
                ):
                    return
                first = one.submit.first_choice
                choice = self.chance.randrange(first, first + one.submit.num_choices)
                self.fail(one, worker_pb2.FAILURE_KIND_PREEMPTED, choice)
                rest = one.outputs
                one.outputs = (o for o in rest if not (o.HasField("tokens") and o.choice == choice))
            case "leave":
                self.left.add(one.worker)


def make_execution(
    request: TokenRequest,
    timeline: inference_pb2.Timeline,
    cancelled: Collection[int] = (),
    **options: Any,
) -> RequestExecution:
    """Makes the execution of a request; `options` have at least `send` and `registry`."""
    usual: dict[str, Any] = {
        "timer": RequestTimer(request, timeline, NULL_METRICS, time.monotonic),
        "poison_guard": PoisonGuard(),
        "park_seconds": PARK_SECONDS,
        "wake": lambda: None,
        "clock": time.monotonic,
    }
    return RequestExecution(request, cancelled, **(usual | options))


def start(
    pools: FakePools, request: TokenRequest, cancelled: Collection[int] = (), **options: Any
) -> tuple[RequestExecution, inference_pb2.Timeline]:
    timeline = inference_pb2.Timeline()
    execution = make_execution(
        request, timeline, cancelled, send=pools.send, registry=pools, **options
    )
    execution.start()
    return execution, timeline


class Caller:
    """Reads deltas and checks what holds for each."""

    def __init__(self, num_choices: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.finished: set[int] = set()
        self.num_prompt_logprobs = 0

    def take(self, delta: TokenDelta) -> None:
        assert delta.choice not in self.finished
        assert delta.first_index == len(self.ids[delta.choice])
        self.ids[delta.choice] += delta.ids
        if delta.prompt_logprobs:
            self.num_prompt_logprobs += 1
        if delta.finish_reason != UNFINISHED:
            self.finished.add(delta.choice)

    def read(self, execution: RequestExecution) -> None:
        for delta in execution.deltas():
            self.take(delta)

    def read_until(self, pools: FakePools, execution: RequestExecution, num_tokens: int) -> None:
        """Advances until each choice that goes on has so many tokens."""
        while any(
            len(ids) < num_tokens
            for choice, ids in enumerate(self.ids)
            if choice not in self.finished
        ):
            pools.advance()
            self.read(execution)


def choices_request(num_choices: int, max_tokens: int = 30, **fields: Any) -> TokenRequest:
    sampling = inference_pb2.SamplingParams(temperature=1, top_p=1, seed=SEED)
    return token_request(
        (5, 6, 7, 8),
        max_tokens,
        name="r",
        sampling=sampling,
        num_choices=num_choices,
        prompt_logprobs=0,
        **fields,
    )
