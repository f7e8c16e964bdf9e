"""A world of played workers without networks, in which one request runs: every token depends on all before it."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from tandem.proto import inference_pb2, worker_pb2
from tandem.router.dispatch.attempt import Leg, WorkerLeft
from tandem.router.dispatch.execution import RequestExecution
from tandem.router.dispatch.request_timer import RequestTimer
from tandem.router.dispatch.worker_client import WorkerClient
from tandem.router.request import TokenDelta, TokenRequest
from tandem.router.scheduling.policy import Placement
from tandem.tests.fleet import token_request

SEED = 1000
UNFINISHED = inference_pb2.FINISH_REASON_UNSPECIFIED


def next_token(seed: int, history: tuple[int, ...]) -> int:
    return random.Random(repr((seed, history))).randrange(1, 100)


def finish_of(token: int, num_left: int) -> "inference_pb2.FinishReason":
    if token % 13 == 0:
        return inference_pb2.FINISH_REASON_STOP
    return inference_pb2.FINISH_REASON_LENGTH if num_left == 0 else UNFINISHED


def completion(prompt: tuple[int, ...], seed: int, max_tokens: int) -> list[int]:
    ids: list[int] = []
    while not ids or finish_of(ids[-1], max_tokens - len(ids)) == UNFINISHED:
        ids.append(next_token(seed, (*prompt, *ids)))
    return ids


class PlayedLink(WorkerClient):
    """A link without a stream."""

    def __init__(self) -> None:
        self._attempts = {}
        self._broken = False
        self._commands = asyncio.Queue()
        self._on_break = lambda: None

    def say(self, output: worker_pb2.Output) -> None:
        self._route(output)

    def kill(self) -> None:
        self._break()
        self._attempts.clear()

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def cancels(self) -> list[worker_pb2.Cancel]:
        commands = [self._commands.get_nowait() for _ in range(self._commands.qsize())]
        return [command.cancel for command in commands if command.HasField("cancel")]


def outputs_of(submit: worker_pb2.Submit) -> Iterator[worker_pb2.Output]:
    """What a worker says to a submit, one by one."""

    def output(choice: int = 0, **event: Any) -> worker_pb2.Output:
        return worker_pb2.Output(request_id=submit.request_id, attempt=submit.attempt, choice=choice, **event)

    yield output(admitted=worker_pb2.Admitted(cached_tokens=1, kv=worker_pb2.KvHandle(epoch=1)))
    histories = {
        choice: tuple(submit.token_ids)
        for choice in range(submit.first_choice, submit.first_choice + submit.num_choices)
    }
    if submit.task == worker_pb2.TASK_DECODE:
        yield output(joined=worker_pb2.Joined(transfer_bytes=10, transfer_active_seconds=0.1))
    for step in range(submit.max_tokens):
        for choice, history in list(histories.items()):
            token = next_token(submit.sampling.seed + choice, history)
            finish = finish_of(token, submit.max_tokens - step - 1)
            is_first = step == 0 and choice == submit.first_choice
            tokens = worker_pb2.Tokens(first_index=submit.first_index + step, ids=[token], finish_reason=finish)
            tokens.prefill_seconds = 0.5 if is_first else 0.0
            if is_first and submit.HasField("prompt_logprobs"):
                tokens.prompt_logprobs.extend(worker_pb2.TokenScores() for _ in submit.token_ids[1:])
            histories[choice] = (*history, token)
            if finish != UNFINISHED:
                del histories[choice]
            if submit.task != worker_pb2.TASK_DECODE or step:
                yield output(choice, tokens=tokens)
        if submit.task == worker_pb2.TASK_PREFILL:
            return


@dataclass
class Job:
    worker: str
    submit: worker_pb2.Submit
    link: PlayedLink
    outputs: Iterator[worker_pb2.Output]


@dataclass
class World:
    """Workers, the view of them and the one request."""

    chance: random.Random
    pairs: bool
    links: dict[str, PlayedLink] = field(default_factory=dict)
    epochs: Counter[str] = field(default_factory=Counter)
    jobs: list[Job] = field(default_factory=list)
    submits: list[worker_pb2.Submit] = field(default_factory=list)
    held: Counter[tuple[str, str]] = field(default_factory=Counter)  # what the view believes to be sent and not ended
    measured_tokens: list[int] = field(default_factory=list)
    num_transfers: int = 0
    left: set[str] = field(default_factory=set)

    # --- what the run asks for ---

    def send(self, worker_id: str, submit: worker_pb2.Submit) -> Leg:
        if worker_id in self.left:
            self.left.clear()
            raise WorkerLeft
        link = self.links.get(worker_id)
        if link is None or link.broken:
            link = self.links[worker_id] = PlayedLink()
            self.epochs[worker_id] += 1
        self.submits.append(submit)
        self.jobs.append(Job(worker_id, submit, link, outputs_of(submit)))
        return Leg(worker=(worker_id, self.epochs[worker_id]), attempt=link.submit(submit, asyncio.Event()))

    def place(self, request: TokenRequest, avoid: Collection[str] = ()) -> Placement | None:
        free = [name for name in ("d1", "d2", "d3", "d4") if name not in avoid]
        prefill = [name for name in ("p1", "p2", "p3", "p4") if name not in avoid]
        if not free:
            return None
        return Placement(prefill=self.chance.choice(prefill) if self.pairs else None, decode=self.chance.choice(free))

    def sent(self, worker_id: str, request: TokenRequest, num_tokens: int) -> None:
        self.held[worker_id, request.request_id] = 1

    def computed(self, worker_id: str, request_id: str) -> None:
        assert self.held[worker_id, request_id]

    def ended(self, worker_id: str, request_id: str) -> None:
        self.held.pop((worker_id, request_id), None)

    def measured(self, worker_id: str, *, prefill_tokens: int, prefill_seconds: float) -> None:
        assert prefill_seconds == 0.5
        self.measured_tokens.append(prefill_tokens)

    def transferred(self, prefill_worker: str, decode_worker: str, num_bytes: int, seconds: float) -> None:
        assert (prefill_worker[0], decode_worker[0], num_bytes) == ("p", "d", 10)
        self.num_transfers += 1

    # --- what befalls it ---

    def advance(self) -> None:
        """A job that is alive says the next thing, as a rule several in a row."""
        alive = [job for job in self.jobs if not job.link.broken]
        if alive:
            job = self.chance.choice(alive)
            for _ in range(self.chance.randrange(1, 6)):
                if (output := next(job.outputs, None)) is None:
                    self.jobs.remove(job)
                    return
                job.link.say(output)

    def fail(self, job: Job, kind: "worker_pb2.FailureKind", choice: int = 0, message: str = "because") -> None:
        failure = worker_pb2.Failure(kind=kind, message=message)
        job.link.say(
            worker_pb2.Output(
                request_id=job.submit.request_id, attempt=job.submit.attempt, choice=choice, failure=failure
            )
        )

    def strike(self, kind: str) -> None:
        """A fault of a kind befalls one of the jobs that are alive."""
        alive = [job for job in self.jobs if not job.link.broken]
        if not alive:
            return
        job = self.chance.choice(alive)
        match kind:
            case "kill":
                job.link.kill()
            case "transfer":
                self.fail(job, worker_pb2.FAILURE_KIND_TRANSFER)
                self.jobs.remove(job)
            case "full":
                self.fail(job, worker_pb2.FAILURE_KIND_FULL)
                self.jobs.remove(job)
            case "preempt":
                first = job.submit.first_choice
                choice = self.chance.randrange(first, first + job.submit.num_choices)
                self.fail(job, worker_pb2.FAILURE_KIND_PREEMPTED, choice)
                rest = job.outputs
                job.outputs = (o for o in rest if not (o.HasField("tokens") and o.choice == choice))
            case "leave":
                self.left.add(job.worker)


def start(
    world: World, request: TokenRequest, ended: Collection[int] = ()
) -> tuple[RequestExecution, inference_pb2.Timeline]:
    timeline = inference_pb2.Timeline()
    watch = RequestTimer(request, timeline)
    view: Any = world
    run = RequestExecution(request, ended, send=world.send, view=view, watch=watch)
    run.start()
    return run, timeline


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


def choices_request(num_choices: int, max_tokens: int = 30, **fields: Any) -> TokenRequest:
    sampling = inference_pb2.SamplingParams(temperature=1, top_p=1, seed=SEED)
    return token_request(
        (5, 6, 7, 8), max_tokens, name="r", sampling=sampling, num_choices=num_choices, prompt_logprobs=0, **fields
    )


def deltas_until(world: World, run: RequestExecution, caller: Caller, num_tokens: int) -> None:
    """Advances until the caller has so many tokens of each choice that goes on."""
    while any(len(ids) < num_tokens for choice, ids in enumerate(caller.ids) if choice not in caller.finished):
        world.advance()
        for delta in run.deltas():
            caller.take(delta)
