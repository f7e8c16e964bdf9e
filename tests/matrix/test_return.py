"""A conversation returns while the decode worker holds its KV cache and state: the prefill worker
fetches them, and a fault of either worker in the middle of it alters no token.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest

from tandem.router.request import TokenRequest
from tandem.router.scheduling import registry
from tandem.router.scheduling.policy import Candidate
from tandem.tests.matrix.cases import NUM_TOKENS, PROMPT, Case
from tandem.tests.matrix.cluster import Choice, Cluster, Result, collect, make_request
from tandem.tests.matrix.nodes import Node
from tandem.tests.matrix.scenario import REQUEST_SECONDS, Scenario, audit, until
from tandem.tests.token_request import changed

NUM_KNOWN: Final = 64
"""Tokens of the first turn that the decode worker can lend: whole blocks of every layout."""

NEXT_TURN: Final = tuple((5 * n) % 400 + 3 for n in range(9))
FAULTS: Final = (("kill", 0), ("stop", 0), ("cut", 0), ("cut", 1), ("drain", 0))
LAYOUTS: Final = ("1+1", "tp 2", "tiers", "window", "window tiers", "hybrid tp 2", "hybrid tiers")
assert len(PROMPT) + NUM_TOKENS > NUM_KNOWN
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _fetches_however_fast_the_workers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(num_tokens: int, prefill: Candidate, others: Sequence[Candidate]) -> Candidate | None:
        return max(others, key=lambda other: other.matched_tokens, default=None)

    monkeypatch.setattr(registry, "choose_holder", most)


def next_turn(cluster: Cluster, request: TokenRequest, answer: Sequence[int]) -> TokenRequest:
    """Returns the request that continues a conversation."""
    token_ids = (*request.submit.token_ids, *answer, *NEXT_TURN)
    return changed(request, request_id=cluster.name(), token_ids=token_ids)


async def first_turn(cluster: Cluster, holder: Node) -> TokenRequest:
    """Generates an answer, and returns the next turn once the router knows where its cache is."""
    async with asyncio.timeout(REQUEST_SECONDS):
        while True:
            request = make_request("seed", cluster.name())
            result = await collect(cluster.dispatcher, request)
            if result.attempts == 1:
                break
    request = next_turn(cluster, request, result.choices[0].ids)

    def num_known() -> int:
        return cluster.registry._look_up(request).matched.num_tokens(holder.worker_id)

    await until(lambda: num_known() == NUM_KNOWN, "the router knows of the decode worker's cache")
    return request


async def uncached(cluster: Cluster, layout: str) -> list[Choice]:
    """Returns what the next turn gives where nothing is cached."""
    first = await cluster.expect("seed", layout)
    cluster.show(*await cluster.layout(layout))
    request = next_turn(cluster, make_request("seed", cluster.name()), first.choices[0].ids)
    result = await collect(cluster.dispatcher, request)
    assert result.cached_tokens == 0
    return result.choices


@dataclass(eq=False)
class ReturnScenario(Scenario):
    """Causes the fault after the lease of the prefix, before its data has arrived."""

    lender: Node = field(kw_only=True)

    async def play(self) -> Result:
        self.cluster.show(*self.nodes)
        request = await first_turn(self.cluster, self.lender)
        link = self.lender.kv_link
        num_kept = link.num_kept
        link.swallow()
        asked = asyncio.create_task(collect(self.cluster.dispatcher, request))
        try:
            await until(lambda: link.num_kept > num_kept, "the prefill worker fetches")
            assert not asked.done(), "it was over before"
            await self._inject()
            if not self._silences_lender:
                link.resume()
            async with asyncio.timeout(REQUEST_SECONDS):
                return await asked
        finally:
            asked.cancel()

    @property
    def _silences_lender(self) -> bool:
        return self.case.fault == "cut" and self.case.variant == 1 and self.victim is self.lender

    async def _inject(self) -> None:
        if self.case.fault == "cut" and self.victim is self.lender:
            if not self._silences_lender:
                self.lender.kv_link.cut()
            return
        await super()._inject()

    def is_noticed(self, result: Result) -> bool:
        """Returns whether the fetch has failed or the request has another attempt.

        A drained worker may still lend what it has.
        """
        is_drain = self.case.fault == "drain"
        return is_drain or result.attempts > 1 or result.cached_tokens < NUM_KNOWN


@pytest.mark.parametrize(
    "layout",
    [
        "hybrid",
        *(pytest.param(layout, marks=pytest.mark.matrix) for layout in LAYOUTS),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("fault", "variant"), FAULTS)
async def test_a_fault_while_a_conversation_returns_alters_nothing(
    cluster: Cluster, fault: str, variant: int, role: str, layout: str
) -> None:
    expected = await uncached(cluster, layout)
    nodes = await cluster.layout(layout)
    for node in nodes:
        node.control.clear()
    entry, lender = nodes
    victim = entry if role == "prefill" else lender
    case = Case(fault, "pull", "seed", layout, variant)
    await audit(
        ReturnScenario(cluster, case, nodes, victim, entry, lender, Result(expected), lender=lender)
    )


@pytest.mark.parametrize("layout", ["hybrid", pytest.param("window", marks=pytest.mark.matrix)])
async def test_a_returning_conversation_continues_from_the_decode_worker(
    cluster: Cluster, layout: str
) -> None:
    expected = await uncached(cluster, layout)
    nodes = await cluster.layout(layout)
    num_bytes = nodes[1].kv_link.num_bytes
    result = await collect(cluster.dispatcher, await first_turn(cluster, nodes[1]))
    assert result.choices == expected
    assert result.cached_tokens == NUM_KNOWN
    assert nodes[1].kv_link.num_bytes > num_bytes
    await cluster.check_books(nodes)
