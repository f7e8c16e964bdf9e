"""Tests which process `tandem demo --kill` chooses, how it measures pauses, and its verdict."""

from typing import Any

import psutil
import pytest

from tandem.cluster.cli.demo.followed_stream import NUM_TOKENS_AFTER, FollowedStream, Pause
from tandem.cluster.cli.demo.kill import KillReport, choose_target
from tandem.cluster.cli.demo.mixed_requests import mixed_requests
from tandem.cluster.cli.demo.processes import CONTROLLER, PlacedRequest, ServiceProcesses
from tandem.proto.errors import Unavailable
from tandem.router.client.types import Choice

REQUESTS = mixed_requests(48)


def placed(name: str, **fields: Any) -> PlacedRequest:
    given: dict[str, Any] = {"router": "r0", "prefill": "p0", "decode": "d0"}
    return PlacedRequest(name=name, **{"is_prefilling": False} | given | fields)


def ended(*choices: Choice, error: str = "") -> FollowedStream:
    stream = FollowedStream(REQUESTS[0], lambda _: None)
    stream.choices, stream.error = choices, error
    return stream


def choice(*ids: int) -> Choice:
    return Choice(text="", token_ids=ids, finish_reason="length")


def test_there_are_sixteen_requests_of_each_kind_with_seeds_of_their_own() -> None:
    assert len(REQUESTS) == 16 == len({each.name for each in REQUESTS})
    kinds = {each.name.rpartition("-")[0] for each in REQUESTS}
    assert kinds == {"seeded", "json", "tools", "n=4", "logprobs"}
    assert all("seed" in each.options for each in REQUESTS)


def test_the_process_with_the_most_requests_is_chosen() -> None:
    requests = [placed("a"), placed("b", decode="d1", router="r1"), placed("c", decode="d1")]
    assert choose_target("decode", requests) == ("d1", {"b", "c"})
    assert choose_target("router", requests) == ("r0", {"a", "c"})
    assert choose_target("controller", requests) == (CONTROLLER, set())


def test_a_prefill_worker_is_chosen_by_the_prompts_that_it_computes() -> None:
    requests = [placed("a"), placed("b"), placed("c", prefill="p1", is_prefilling=True)]
    assert choose_target("prefill", requests) == ("p1", {"c"})
    assert choose_target("prefill", requests[:2]) == ("p0", set())  # too late for their prompts


def test_a_process_that_has_ended_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another process; psutil tells them apart."""

    def refuse(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "kill", refuse)
    processes = object.__new__(ServiceProcesses)
    processes._processes = {"w0": psutil.Process()}
    for name in ("w0", "w1"):
        with pytest.raises(Unavailable, match=name):
            processes.kill(name)


def test_without_a_request_there_is_no_target() -> None:
    with pytest.raises(Unavailable, match="prefill worker"):
        choose_target("prefill", [placed("a", prefill="")])


def test_a_pause_ends_with_tokens_from_elsewhere_alone() -> None:
    pause = Pause(is_cut=True, missing={0: NUM_TOKENS_AFTER})
    pause.take(0, 2 * NUM_TOKENS_AFTER, 0.1)  # they were on their way
    assert not pause.is_over
    pause.is_elsewhere = True
    pause.take(0, NUM_TOKENS_AFTER - 1, 0.7)
    assert not pause.is_over
    pause.take(0, 1, 0.2)
    assert pause.is_over
    pause.take(0, 1, 9.0)
    assert pause.seconds == 0.7


@pytest.mark.parametrize(
    ("disturbed", "num_held", "lines"),
    [
        (ended(choice(1, 2)), 0, []),
        (ended(choice(1, 2)), 3, ["KV blocks that workers still hold: 3"]),
        (ended(error="Unavailable: gone"), 0, ["streams lost: 1"]),
        (ended(choice(1, 3)), 0, ["streams altered: 1"]),
    ],
)
def test_the_verdict_is_computed(
    disturbed: FollowedStream, num_held: int, lines: list[str]
) -> None:
    name = disturbed.request.name
    report = KillReport(
        undisturbed={name: ended(choice(1, 2))},
        disturbed=[disturbed],
        num_held_blocks=num_held,
        seconds=1,
    )
    assert report.passed == (not lines)
    assert set(lines) <= set(report.lines())
    num_differing = {"streams lost: 1": 2, "streams altered: 1": 1}.get("".join(lines), 0)
    expected = f"tokens that differ from an undisturbed run: {num_differing}"
    assert report.lines()[-1] == expected
