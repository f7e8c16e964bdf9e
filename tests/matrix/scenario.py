"""Plays one case of the fault matrix: brings a request to a point, injects the fault, compares with
a run without.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tandem.router.dispatch.execution import MAX_TRANSFERS_LOST
from tandem.tests.matrix.cases import NUM_TOKENS, PROMPT_LENGTH, RULED, Case
from tandem.tests.matrix.cluster import (
    NO_STOPS,
    Cluster,
    Result,
    collect,
    make_request,
    stops_of,
)
from tandem.tests.matrix.nodes import Node
from tandem.tests.peers import peer_channel
from tandem.tests.waits import WAIT
from tandem.tests.workers.raw_session import RawSession, submit
from tandem.workers.engine.config import SpeculativeConfig

REACH_SECONDS: Final = WAIT
REQUEST_SECONDS: Final = WAIT
TOKEN_POINT: Final = (
    5  # tokens that the worker has when "token" is reached; the client has some of them
)
_DRAFT_TOKENS: Final = SpeculativeConfig().num_speculative_tokens


async def until(condition: Callable[[], object], what: str, seconds: float = REACH_SECONDS) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timeout: {what}"
        await asyncio.sleep(0.002)


class OverBefore(AssertionError):
    """Raised if the request has ended before its point."""


@dataclass(eq=False)
class Scenario:
    """Plays a case."""

    cluster: Cluster
    case: Case
    nodes: Sequence[Node]
    victim: Node  # of the fault
    entry: Node  # gets the request first
    holder: Node  # whose step is held at the point
    expected: Result
    num_tokens: int = NUM_TOKENS
    token_point: int = TOKEN_POINT
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)
    has_tokens: bool = False  # the client
    max_seconds: float | None = None  # of the request; then a kill ends all workers, for good

    @property
    def hold_from(self) -> int:
        """Returns the position at which the holder stops for the point."""
        case, first = self.case, self.expected.choices[0]
        num_tokens = len(first.ids) if case.sampling in RULED else self.num_tokens
        # Before the block that the worker does not get, nor already has for a draft.
        num_drafts = _DRAFT_TOKENS if "speculative" in self.holder.config else 0
        early = 1 + num_drafts if case.fault == "full" else 0
        return {
            "queued": 0,
            "prefill": 16,
            "pull": PROMPT_LENGTH - 1,
            "token": PROMPT_LENGTH + self.token_point - 1,
            "last": PROMPT_LENGTH + num_tokens - 2 - early,
        }[case.point]

    async def play(self) -> Result:
        """Returns what the client got."""
        sampling = self.case.sampling
        request = make_request(sampling, self.cluster.name(), num_tokens=self.num_tokens)
        if self.max_seconds is not None:
            request = replace(request, ends_at=time.monotonic() + self.max_seconds)
        stops = stops_of(sampling, self.expected) if sampling in RULED else NO_STOPS
        async with AsyncExitStack() as stack:
            await self._block(stack)
            # Sessions break on a busy machine, and a request passes by a lost worker.
            await until(lambda: not self.cluster.registry.has_lost, "no worker is lost")
            asked = asyncio.create_task(collect(self.cluster.dispatcher, request, stops, self._see))
            stack.callback(asked.cancel)
            await until(
                lambda: self.entry.control.num_submits >= 2 or asked.done(),
                "the request is submitted",
            )
            _check_open(asked)
            self.cluster.show(*self.nodes)
            await self._reach(asked)
            await self._inject()
            for node in self.nodes:
                node.control.release()
            async with asyncio.timeout(REQUEST_SECONDS):
                return await asked

    def _see(self, result: Result) -> None:
        self.has_tokens = any(choice.ids for choice in result.choices)

    async def _block(self, stack: AsyncExitStack) -> None:
        """Has the entry's engine busy with another request, so that ours waits there."""
        self.cluster.show(*self._first_nodes())
        self.entry.control.hold_from = 0
        channel = await stack.enter_async_context(peer_channel(self.entry.address))
        session = RawSession(channel)
        await session.send(
            submit("blocker", token_ids=range(3, 11), max_tokens=1, cache_salt=b"blocker")
        )
        await until(lambda: self.entry.control.is_held, "the entry is blocked")

    def _first_nodes(self) -> list[Node]:
        return list({node.role: node for node in reversed(self.nodes)}.values())

    async def _reach(self, asked: "asyncio.Task[Result]") -> None:
        """Brings the request to the point of the case."""
        fills = self.case.fault == "full" and self.case.point in ("queued", "prefill", "pull")
        if fills:
            for node in self.nodes:
                is_full = node is self.victim or (
                    self.case.point == "prefill" and node.role == "prefill"
                )
                node.control.refusals = int(is_full)
        if self.case.point == "queued" or (fills and self.victim is self.entry):
            return
        num_bytes, num_holds = self.entry.kv_link.num_bytes, self.holder.control.num_holds
        self.holder.control.hold_from = self.hold_from
        if self.holder is not self.entry:
            self.entry.control.release()
        await until(
            lambda: self.holder.control.num_holds > num_holds or asked.done(),
            "the point is reached",
        )
        await until(
            lambda: self.victim.control.num_submits or asked.done(), "the victim has the request"
        )
        if (
            self.entry is not self.victim
            and self.case.point == "pull"
            and self.case.fault != "full"
        ):
            await until(lambda: self.entry.kv_link.num_bytes > num_bytes, "the victim fetches")
            # Those bytes may be of a connection that is made again while nothing fetches.
            assert self._num_transfers_lost() < MAX_TRANSFERS_LOST, "the victim fetches no more"
        streams = self.case.sampling != "beam"  # which gives its tokens at its end
        if self.case.point in ("token", "last") and streams:
            await until(lambda: self.has_tokens or asked.done(), "the client has tokens")
        _check_open(asked)

    def _num_transfers_lost(self) -> int:
        """Returns how many fetches of the request have failed."""
        return max(
            (max(each._num_transfers_lost) for each in self.cluster.dispatcher._running), default=0
        )

    async def _inject(self) -> None:
        """Causes the fault."""
        case, victim, client = self.case, self.victim, self.cluster.client(self.victim)
        if case.fault == "kill" and self.max_seconds is not None:
            self.cluster.show(victim)  # a prefill worker would decode as well
            for node in self.nodes:
                if node is not victim:
                    await node.kill(0)
        if case.fault == "kill":
            await victim.kill(case.variant % victim.tp)
            await until(lambda: client is None or client.broken, "the session breaks")
            if self.max_seconds is None:
                self.tasks.append(asyncio.create_task(self._replace()))
        elif case.fault == "stop":
            victim.signal(signal.SIGSTOP)
        elif case.fault == "cut":
            link = victim.router_link
            if case.point == "pull" and self.entry is not victim:
                link = self.entry.kv_link
            link.swallow() if case.variant else link.cut()
        elif case.fault == "drain":
            self.tasks.append(asyncio.create_task(victim.drain()))
            await until(
                lambda: client is None or client.broken or client._drains,
                "the router knows of the drain",
            )
            if client is not None and client._told:
                await until(lambda: victim.control.num_suspends, "the worker is told to suspend")
        elif case.point in ("token", "last"):
            victim.control.starves = True

    def describe(self) -> str:
        """Returns the state of nodes and requests, for a report of a failure."""
        lines = [f"victim {self.victim.worker_id}, held from {self.hold_from}"]
        for node in self.nodes:
            client = self.cluster.client(node)
            lines.append(
                f"{node.worker_id}: {node.control} spent: {node.is_spent}, "
                f"session: {client is not None and list(client._streams)}"
            )
        for execution in self.cluster.dispatcher._running:
            lines.append(f"request: parked {execution._parked}, emitted {execution._emitted}")
            lines += [f"attempt: {vars(attempt)}" for attempt in execution._attempts]
        return "\n".join(lines)

    def is_noticed(self, result: Result) -> bool:
        """Returns whether the fault has changed how the request was computed, if it had to."""
        case = self.case
        # A cut may come between two streams of a fetch, but no fetch ends over a link that passes
        # nothing on. A drained worker without another ends what it has.
        return (
            result.attempts > 1
            or case.fault == "drain"
            or (case.fault, case.point, case.variant) == ("cut", "pull", 0)
        )

    async def _replace(self) -> None:
        """Has the directory drop a dead worker, and list it again once it is back."""
        self.cluster.show(*(node for node in self.nodes if node is not self.victim))
        await self.victim.restart()
        self.cluster.show(*self.nodes)

    async def recover(self) -> None:
        """Ends the fault; afterwards all nodes of the layout run."""
        for node in self.nodes:
            node.release()
            if node.pids:
                node.signal(signal.SIGCONT)
        await asyncio.gather(*self.tasks)
        spent = [node for node in self.nodes if node.is_spent]
        await self.cluster.check_books([node for node in self.nodes if node not in spent])
        await asyncio.gather(*(node.restart() for node in spent))
        for node in self.nodes:
            node.control.clear()


def _check_open(asked: "asyncio.Task[Result]") -> None:
    """Raises OverBefore if the request has ended."""
    if asked.done():
        raise OverBefore(f"it was over before: {asked.exception() or asked.result()}")


async def prepare(
    cluster: Cluster, case: Case, nodes: Sequence[Node] = (), num_tokens: int = NUM_TOKENS
) -> Scenario:
    """Makes the scenario of a case: runs its nodes and, the first time, the request without a
    fault.
    """
    expected = await cluster.expect(case.sampling, case.layout, num_tokens)
    nodes = nodes or await cluster.layout(case.layout)
    for node in nodes:
        node.control.clear()
    entry = nodes[0]
    decode = next(node for node in nodes if node.role == "decode")
    victim = entry if case.point in ("queued", "prefill") else decode
    holder = entry if case.point in ("queued", "prefill", "pull") else decode
    return Scenario(cluster, case, nodes, victim, entry, holder, expected, num_tokens)


async def check(cluster: Cluster, case: Case, nodes: Sequence[Node] = ()) -> Result:
    """Plays a case, on `nodes` in place of those of its layout if there are any, see `audit`."""
    return await audit(await prepare(cluster, case, nodes))


async def audit(scenario: Scenario) -> Result:
    """Plays a scenario and fails unless the client got what it gets without the fault, and nothing
    is left.
    """
    try:
        result = await scenario.play()
        assert result.choices == scenario.expected.choices, "the output is altered"
        assert scenario.is_noticed(result), "the fault was not noticed"
        await scenario.recover()
    except BaseException as error:
        error.add_note(scenario.describe())
        for node in scenario.nodes:
            node.release()
            node.is_spent = True
        await asyncio.gather(*scenario.tasks, return_exceptions=True)
        raise
    return result
