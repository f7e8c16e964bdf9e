"""The parts of a timeline add up and none is negative, whatever happened and whenever it ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2, worker_pb2
from tandem.router.dispatch import request_timer
from tandem.router.dispatch.request_timer import RequestTimer
from tandem.router.scheduling.policy import Placement
from tandem.tests.fleet import token_request

PARTS = ("tokenize", "queue", "dispatch", "prefill", "kv_transfer", "decode")


class Clock:
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Run:
    """A stopwatch on a clock of its own."""

    def __init__(self, num_choices: int = 1) -> None:
        self.clock = Clock()
        self.timeline = inference_pb2.Timeline()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_timer, "time", self.clock)
            self.watch = RequestTimer(token_request(range(50), arrived=100.0, num_choices=num_choices), self.timeline)

    def at(self, now: float, event: str) -> None:
        self.clock.now = now
        output = worker_pb2.Output()
        decode = event.startswith("decode ")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_timer, "time", self.clock)
            match event.removeprefix("decode "):
                case "dispatched":
                    self.watch.dispatched(Placement(prefill="p", decode="d"), 1)
                    return
                case "stop":
                    self.watch.stop()
                    return
                case "admitted":
                    output.admitted.queue_seconds = 0.25
                case "kv_received":
                    output.kv_received.transfer_bytes = 1000
                case "token":
                    output.tokens.prefill_seconds = 0.0 if decode else 0.5
                    self.watch.observe(output, decode=decode)
                    self.watch.tokens(1)
                    return
            self.watch.observe(output, decode=decode)

    def parts(self) -> list[float]:
        return [getattr(self.timeline, f"{part}_seconds") for part in PARTS]


STATIONS = [
    (1.0, "dispatched"),
    (1.5, "admitted"),
    (2.0, "decode admitted"),
    (4.0, "token"),
    (7.0, "decode kv_received"),
    (9.0, "decode token"),
    (11.0, "decode token"),
]


def test_a_whole_request() -> None:
    run = Run()
    for after, event in [*STATIONS, (12.0, "stop")]:
        run.at(100 + after, event)
    assert run.parts() == pytest.approx([1.0, 0.25, 2.25, 0.5, 3.0, 4.0])
    assert run.timeline.end_to_end_seconds == pytest.approx(11.0)
    assert run.timeline.ttft_seconds == pytest.approx(4.0)
    assert run.timeline.tpot_seconds == pytest.approx(3.5)
    assert (run.timeline.completion_tokens, run.timeline.kv_transfer_bytes) == (3, 1000)


def test_the_time_of_a_token_is_that_of_a_step_of_all_choices() -> None:
    run = Run(num_choices=2)
    for after, event in [(1.0, "dispatched"), *((t, "token") for t in (4.0, 4.0, 6.0, 6.0, 8.0, 8.0)), (9.0, "stop")]:
        run.at(100 + after, event)
    assert run.timeline.tpot_seconds == pytest.approx(2.0)
    assert run.timeline.completion_tokens == 6


def test_waiting_for_blocks_after_the_first_token_is_queueing() -> None:
    run = Run()
    late = [s for s in STATIONS if s[1] != "decode admitted"]
    late.insert(3, (6.0, "decode admitted"))
    for after, event in [*late, (12.0, "stop")]:
        run.at(100 + after, event)
    assert run.parts() == pytest.approx([1.0, 2.25, 2.25, 0.5, 1.0, 4.0])


@given(st.integers(0, len(STATIONS)), st.lists(st.floats(0.75, 5), min_size=8, max_size=8), st.booleans())
def test_the_parts_add_up_wherever_it_ends(count: int, waits: list[float], retried: bool) -> None:
    run, now = Run(), 100.0
    stations = STATIONS[:count]
    for (_, event), wait in zip(stations + (STATIONS[:3] if retried and count else []), waits * 2, strict=False):
        now += wait
        run.at(now, event)
    run.at(now + waits[-1], "stop")
    assert sum(run.parts()) == pytest.approx(run.timeline.end_to_end_seconds)
    assert min(run.parts()) >= -1e-9
