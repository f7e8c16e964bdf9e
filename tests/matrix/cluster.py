"""Holds the workers of all layouts, and a dispatcher that sees those of one layout at a time."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tandem.proto import inference_pb2, worker_pb2
from tandem.router.dispatch.blocked_prompts import BlockedPrompts
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.worker_client import WorkerClient
from tandem.router.request import TokenRequest
from tandem.router.scheduling.capacity import NO_CAPACITY
from tandem.router.scheduling.registry import WorkerRegistry
from tandem.router.stopping.pattern import compile_pattern
from tandem.router.stopping.repetition import RepetitionStop
from tandem.router.stopping.rules import StopRules
from tandem.router.stopping.text import StopTexts
from tandem.tests.fleet import Unlimited, is_idle
from tandem.tests.matrix.cases import NUM_TOKENS, PROMPT, REQUESTS, RULED
from tandem.tests.matrix.nodes import Launcher, Node, launched, make_node
from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import make_tiny_model
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT

LAYOUT_NODES: Final = {
    "1+1": ("p0", "d0"),
    "2+2": ("p0", "d0", "p1", "d1"),
    "0+2": ("d0", "d1"),
    "tp 2": ("p-split", "d-split"),
    "int8": ("p-int8", "d-int8"),
    "fp8": ("p-fp8", "d-fp8"),
    "ngram": ("p-ngram", "d-ngram"),
    "tiers": ("p-tiers", "d-tiers"),
    "window": ("p-window", "d-window"),
    "window tiers": ("p-window-tiers", "d-window-tiers"),
    "hybrid": ("p-hybrid", "d-hybrid"),
    "hybrid tp 2": ("p-hybrid-split", "d-hybrid-split"),
    "hybrid tiers": ("p-hybrid-tiers", "d-hybrid-tiers"),
}
"""The nodes of a layout; the first of each role gets the request. int8 and fp8 are of the KV cache,
window is of a model with sliding windows, hybrid of one whose layers keep states as well.
"""

_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "ngram": {"speculative": {"prompt_lookup_min": 1}},
    # Two or three requests fill the KV cache, and ten the host memory.
    "tiers": {"kv_cache_bytes": 3 * 2**17, "kv_host_bytes": 2**20, "kv_disk_bytes": 2**22},
    "window-tiers": {
        "kv_cache_bytes": 3 * 2**17,
        "kv_host_bytes": 2**20,
        "speculative": {"prompt_lookup_min": 1},
    },
    "hybrid-tiers": {
        "kv_cache_bytes": 3 * 2**18,  # 98 blocks and 27 states
        "kv_host_bytes": 2**21,
        "speculative": {"prompt_lookup_min": 1},
    },
}
"""What the nodes have whose names end so."""

_COMPUTES_AS: Final = {
    **dict.fromkeys(("2+2", "0+2", "ngram", "tiers"), "1+1"),
    "window tiers": "window",
    "hybrid tiers": "hybrid",
}
"""By layout, a simpler one with the same tokens; the other layouts add in other orders."""

IDLE_SECONDS: Final = WAIT
MOST_REPEATING: Final = 20
"""A repetition ends a choice after at most this many tokens."""

NO_STOPS: Final[Mapping[int, StopRules]] = {}


@dataclass
class Choice:
    """What a client has got of one choice."""

    ids: list[int] = field(default_factory=list)
    scores: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    prompt_scores: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(
        default_factory=list
    )
    finish: int = 0
    score: float = 0.0
    text: str = ""  # of a choice with a rule of the router


@dataclass
class Result:
    """What a client has got of a request."""

    choices: list[Choice]
    attempts: int = 0
    cached_tokens: int = 0  # of the prompt


def scores_of(
    messages: Sequence[worker_pb2.TokenScores],
) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
    """Returns log probabilities in a form that compares bit by bit."""
    return [(each.logprob, tuple(each.top_ids), tuple(each.top_logprobs)) for each in messages]


def make_request(sampling: str, name: str, **fields: Any) -> TokenRequest:
    """Returns the request of a sampling, which shares no prefix cache with others; `name` is to be
    unique.
    """
    values: dict[str, Any] = {"ignore_eos": True, "cache_salt": name.encode()[-32:]}
    return token_request(
        PROMPT,
        fields.pop("num_tokens", NUM_TOKENS),
        name=name,
        **values | REQUESTS[sampling],
        **fields,
    )


async def collect(
    dispatcher: Dispatcher,
    request: TokenRequest,
    stops: Mapping[int, StopRules] = NO_STOPS,
    seen: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Runs a request, checking its indices and ends. `stops` are rules of the router by choice, for
    a text that has one character for each token.
    """
    searches = {choice: (rules.texts(), rules.repetition()) for choice, rules in stops.items()}
    result, ended = Result([Choice() for _ in range(request.submit.num_choices)]), set[int]()
    timeline = inference_pb2.Timeline()
    finished: set[int] = set()
    async with aclosing(dispatcher.generate(request, timeline, ended)) as deltas:
        async for delta in deltas:
            choice = result.choices[delta.choice]
            assert delta.choice not in finished, "a choice ended twice"
            assert delta.choice not in ended, "a choice goes on that was given up"
            assert delta.first_index == len(choice.ids), "a token is missing or repeated"
            num_known = len(choice.ids)
            choice.ids += delta.ids
            choice.scores += scores_of(delta.logprobs)
            choice.prompt_scores += scores_of(delta.prompt_logprobs)
            if delta.finish_reason:
                finished.add(delta.choice)
                choice.finish, choice.score = delta.finish_reason, delta.score
            if delta.choice in searches:
                stopped = _stop(choice, num_known, *searches[delta.choice])
                ended |= {delta.choice} if stopped else set()
            seen(result)
    assert finished | ended == set(range(request.submit.num_choices)), "a choice has no end"
    result.attempts = timeline.attempts
    result.cached_tokens = timeline.cached_tokens
    return result


def _stop(
    choice: Choice, num_known: int, search: StopTexts, repetition: RepetitionStop | None
) -> bool:
    """Cuts a choice off after its match or repetition, if its new tokens complete one."""
    if repetition is not None:
        count = repetition.push(choice.ids[num_known:])
        if count is not None:
            del choice.ids[num_known + count :], choice.scores[num_known + count :]
            choice.finish = inference_pb2.FINISH_REASON_REPETITION
        return count is not None
    for end, token in enumerate(choice.ids[num_known:], start=num_known + 1):
        shown, is_stopped = search.push(_character(token))
        choice.text += shown
        if is_stopped:
            del choice.ids[end:], choice.scores[end:]
            choice.finish = inference_pb2.FINISH_REASON_STOP
            return True
    return False


def _character(token: int) -> str:
    """Returns the character that stands for a token: one that is no sign of a pattern."""
    return chr(0x4E00 + token)


@dataclass(eq=False)
class Cluster:
    """Runs nodes and a dispatcher that sees some of them."""

    launcher: Launcher
    model: Path
    window_model: Path  # with windows of 24 tokens, in blocks of 16 beside full blocks of 32
    hybrid_model: Path  # of layers with states and one with attention
    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    registry: WorkerRegistry = field(default_factory=WorkerRegistry)
    # By sampling, a layout that computes alike and number of tokens.
    expected: dict[tuple[str, str, int], Result] = field(default_factory=dict)
    dispatcher: Dispatcher = field(init=False)
    num_requests: int = 0

    def __post_init__(self) -> None:
        self.dispatcher = self.router()

    async def node(self, worker_id: str, **fields: Any) -> Node:
        """Returns a node that runs, started if it does not, and that the router would place
        requests on.
        """
        if worker_id not in self.nodes:
            tp = 2 if worker_id.endswith("split") else 1
            config = _CONFIGS.get(worker_id.partition("-")[2], {})
            if "kv_disk_bytes" in config:
                config = config | {"kv_disk": str(self.folder / f"disk-{worker_id}")}
            fields = {"tp": tp, "config": config} | fields
            self.nodes[worker_id] = await make_node(
                self.launcher, self._model_of(worker_id), self.folder, worker_id, **fields
            )
        elif self.nodes[worker_id].is_spent:
            await self.nodes[worker_id].restart()
        node = self.nodes[worker_id]
        async with asyncio.timeout(IDLE_SECONDS):
            while self.registry.is_lost(
                worker_id, node.info.epoch
            ):  # it was cut off or stopped before
                await asyncio.sleep(0.01)
        return node

    def _model_of(self, worker_id: str) -> Path:
        """Returns the model that a node serves."""
        if "window" in worker_id:
            return self.window_model
        return self.hybrid_model if "hybrid" in worker_id else self.model

    async def layout(self, layout: str) -> list[Node]:
        """Returns the running nodes of a layout, in order."""
        return list(await asyncio.gather(*map(self.node, LAYOUT_NODES[layout])))

    def show(self, *nodes: Node) -> None:
        """Makes these the nodes that the directory lists."""
        self.registry.update(node.info for node in nodes if node.pids)

    def client(self, node: Node) -> WorkerClient | None:
        """Returns the dispatcher's session with a node, if there is one that it has not broken."""
        client = self.dispatcher._clients.get((node.worker_id, node.info.epoch))
        return None if client is None or client.broken else client

    def name(self) -> str:
        """Returns a name for a request that no other has."""
        self.num_requests += 1
        return f"request-{self.num_requests}"

    async def expect(self, sampling: str, layout: str, num_tokens: int = NUM_TOKENS) -> Result:
        """Returns what a request has to give: what it gives without a fault."""
        alike = _COMPUTES_AS.get(layout, layout)
        key = sampling, alike, num_tokens
        if key not in self.expected:
            nodes = await self.layout(alike)
            self.show(*nodes)
            result = await self._undisturbed(sampling, num_tokens)
            if sampling in RULED:
                stops = stops_of(sampling, result)
                result = await self._undisturbed(sampling, num_tokens, stops)
                # A worker goes on for some steps after a rule of the router has ended a choice.
                await self.check_books(nodes)
            self.expected[key] = result
        return self.expected[key]

    async def _undisturbed(
        self, sampling: str, num_tokens: int, stops: Mapping[int, StopRules] = NO_STOPS
    ) -> Result:
        """Returns what a request gives without an interruption; a busy machine may cause some."""
        async with asyncio.timeout(IDLE_SECONDS):
            while True:
                request = make_request(sampling, self.name(), num_tokens=num_tokens)
                result = await collect(self.dispatcher, request, stops)
                if result.attempts == 1:
                    return result

    async def check_books(self, nodes: Sequence[Node]) -> None:
        """Waits until these nodes hold nothing; fails if one does, or if the router counts what is
        over.
        """
        assert not self.registry.capacity._reserved, (
            "the registry reserves for a request that is over"
        )
        for state in self.registry._workers.values():
            assert not state.requests, (
                f"the registry counts {state.requests} on {state.info.worker_id}"
            )
            assert state.own == NO_CAPACITY
        deadline = time.monotonic() + IDLE_SECONDS
        for node in nodes:
            status = await node.status()
            while not is_idle(status) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                status = await node.status()
            assert status.integrity_ok, f"the blocks of {node.worker_id} do not add up"
            assert is_idle(status), f"{node.worker_id} is not idle: {status}"
        for client in self.dispatcher._clients.values():
            assert client.broken or not client._streams, f"streams of {client.worker} are left"

    async def renew(self, blocked_prompts: BlockedPrompts | None = None) -> None:
        """Takes a new dispatcher, which holds nothing against any request but what it is given."""
        await self.dispatcher.close()
        self.dispatcher = self.router(blocked_prompts)

    def router(self, blocked_prompts: BlockedPrompts | None = None) -> Dispatcher:
        """Returns a further dispatcher that sees the same nodes."""
        return Dispatcher(
            self.registry,
            Unlimited(self.registry),
            identity=IDENTITY,
            blocked_prompts=blocked_prompts,
        )

    async def close(self) -> None:
        """Ends everything."""
        await self.dispatcher.close()
        await asyncio.gather(*(node.close() for node in self.nodes.values()))


def stops_of(sampling: str, result: Result) -> dict[int, StopRules]:
    """Returns the rules of a request in RULED by choice, from a result without or with them.

    Without a result of the rules, each choice ends about in the middle.
    """
    if sampling == "repetition":
        return {number: _repetition(each.ids) for number, each in enumerate(result.choices)}
    first, second = (each.ids for each in result.choices)
    first = first[13:15] if len(first) > 15 else first[-2:]
    second = second[17:19] if len(second) > 19 else second[-2:]
    pattern = f"[{_character(second[0])}x]+({_character(second[1])}|xy)"
    return {
        0: StopRules(strings=("".join(map(_character, first)),)),
        1: StopRules(pattern=compile_pattern(pattern)),
    }


def _repetition(ids: Sequence[int]) -> StopRules:
    """Returns the rule of a repetition that ends these ids the latest, but before their last ones.

    With the ids that it leaves, the same rule is found.
    """
    rules = [
        StopRules(ngram=ngram, ngram_count=count) for ngram in range(1, 9) for count in (2, 3, 4)
    ]
    ends = [_repetition_end(rule, ids) for rule in rules]
    return rules[ends.index(max(end for end in ends if end <= MOST_REPEATING))]


def _repetition_end(rule: StopRules, ids: Sequence[int]) -> int:
    """Returns the number of ids up to a repetition; 0 without one."""
    search = rule.repetition()
    assert search is not None
    return search.push(ids) or 0


@asynccontextmanager
async def running_cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Makes a model and runs a cluster without nodes yet."""
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "head_dim": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
    }
    model = make_tiny_model(folder / "tiny", **shape)
    window_model = make_tiny_model(folder / "window", "gemma3", **shape)
    hybrid_model = make_tiny_model(folder / "hybrid", "qwen3_5", **shape)
    async with launched() as launcher:
        cluster = Cluster(launcher, model, window_model, hybrid_model, folder)
        try:
            yield cluster
        finally:
            await cluster.close()
