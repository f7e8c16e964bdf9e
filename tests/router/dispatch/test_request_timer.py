"""The parts of a timeline add up and none is negative, whatever happened and whenever it ended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.metrics import INTERRUPTIONS, ITL, RECOVERIES, Metric, Metrics
from tandem.router.dispatch.causes import Cause
from tandem.router.dispatch.request_timer import MAX_INTERRUPTIONS, RequestTimer
from tandem.router.scheduling.policy import Placement
from tandem.router.telemetry.requests import PARTS
from tandem.tests.router.pools import Clock
from tandem.tests.token_request import token_request

OBSERVED = list[tuple[Metric, float, int]]


class Recorder(Metrics):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.observed: OBSERVED = []
        self.added: list[tuple[Metric, dict[str, str]]] = []

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        self.added.append((metric, labels))

    def observe(self, metric: Metric, value: float, count: int = 1, **labels: str) -> None:
        self.observed.append((metric, value, count))


class TimedRequest:
    """A request timer on a clock of its own. Its checks take no time."""

    def __init__(self, num_choices: int = 1) -> None:
        self.clock = Clock()
        self.clock.now = 100.0
        self.recorder = Recorder()
        self.timeline = inference_pb2.Timeline()
        request = token_request(range(50), arrived=100.0, num_choices=num_choices)
        self.timer = RequestTimer(request, self.timeline, self.recorder, self.clock)

    def at(self, now: float, event: str, choice: int = 0) -> None:
        self.clock.now = now
        output = worker_pb2.Output()
        decode = event.startswith("decode ")
        match event.removeprefix("decode "):
            case "dispatched":
                self.timer.dispatched(Placement(prefill="p", decode="d"), 1)
                return
            case "stop":
                self.timer.stop()
                return
            case "admitted":
                output.admitted.queue_seconds = 0.25
                output.admitted.restore_seconds = 0.125
            case "received":
                output.kv_received.transfer_bytes = 1000
            case "token":
                output.tokens.prefill_seconds = 0.0 if decode else 0.5
                self.timer.observe(output, decode=decode)
                self.timer.tokens(1, choice)
                self.timer.stamp()
                return
        self.timer.observe(output, decode=decode)

    def parts(self) -> list[float]:
        return [getattr(self.timeline, f"{part}_seconds") for part in PARTS]


STAGES = [
    (1.0, "dispatched"),
    (1.5, "admitted"),
    (2.0, "decode admitted"),
    (4.0, "token"),
    (7.0, "decode received"),
    (9.0, "decode token"),
    (11.0, "decode token"),
]


def test_a_whole_request() -> None:
    timed = TimedRequest()
    for after, event in [*STAGES, (12.0, "stop")]:
        timed.at(100 + after, event)
    assert timed.parts() == pytest.approx([0.0, 1.25, 2.125, 0.125, 0.5, 3.0, 4.0])
    assert timed.timeline.end_to_end_seconds == pytest.approx(11.0)
    assert timed.timeline.ttft_seconds == pytest.approx(4.0)
    assert timed.timeline.tpot_seconds == pytest.approx(3.5)
    assert (timed.timeline.completion_tokens, timed.timeline.kv_transfer_bytes) == (3, 1000)


def test_the_time_of_a_token_is_that_of_a_step_of_all_choices() -> None:
    timed = TimedRequest(num_choices=3)  # the first ends early, the last had ended elsewhere
    timed.at(101.0, "dispatched")
    for after, choice in ((4.0, 0), (4.0, 1), (6.0, 1), (8.0, 1), (10.0, 1)):
        timed.at(100 + after, "token", choice)
    timed.at(111.0, "stop")
    assert timed.timeline.tpot_seconds == pytest.approx(2.0)
    assert timed.timeline.completion_tokens == 5


def test_what_has_interrupted_it_is_told_at_once_and_bounded() -> None:
    timed = TimedRequest()
    timed.clock.now = 102.0
    for _ in range(MAX_INTERRUPTIONS + 1):
        timed.timer.interrupted("crash", "d1")
    assert len(timed.timeline.interruptions) == MAX_INTERRUPTIONS
    first = timed.timeline.interruptions[0]
    assert (first.cause, first.worker, first.at_seconds) == ("crash", "d1", 2.0)


def test_the_time_to_the_first_token_is_known_before_the_end() -> None:
    timed = TimedRequest()
    for after, event in STAGES[:4]:
        timed.at(100 + after, event)
    assert timed.timeline.ttft_seconds == pytest.approx(4.0)


def test_waiting_for_blocks_after_the_first_token_is_queueing() -> None:
    timed = TimedRequest()
    late = [s for s in STAGES if s[1] != "decode admitted"]
    late.insert(3, (6.0, "decode admitted"))
    for after, event in [*late, (12.0, "stop")]:
        timed.at(100 + after, event)
    assert timed.parts() == pytest.approx([0.0, 3.25, 2.125, 0.125, 0.5, 1.0, 4.0])


def test_a_stream_that_moves_after_it_has_decoded_was_decoded_all_along() -> None:
    decoded = [(1.0, "dispatched"), (4.0, "token"), *((float(t), "token") for t in range(5, 61))]
    moved = [(60.0, "decode admitted"), (60.1, "decode received"), (61.0, "decode token")]
    failed = [(4.1, "decode admitted")]  # of a pair whose transfers failed before a second token
    for stages in (decoded + moved, decoded[:2] + failed + decoded[2:] + moved):
        timed = TimedRequest()
        for after, event in [*stages, (62.0, "stop")]:
            timed.at(100 + after, event)
        assert timed.parts() == pytest.approx([0.0, 1.0, 2.5, 0.0, 0.5, 0.0, 57.0])


def gaps(timed: TimedRequest, *tokens: tuple[float, int, int]) -> OBSERVED:
    """What is observed when (seconds, choice, count) tokens come and the request ends."""
    for after, choice, count in tokens:
        timed.clock.now = 100 + after
        timed.timer.tokens(count, choice)
        timed.timer.stamp()
    timed.at(200.0, "stop")
    return timed.recorder.observed


def test_the_gaps_between_tokens_are_observed_at_the_end() -> None:
    found = gaps(
        TimedRequest(), (1.0, 0, 1), (1.0625, 0, 1), (1.125, 0, 1), (3.125, 0, 1), (4.125, 0, 4)
    )
    assert found == [
        (ITL, 0.0625, 2),
        (ITL, 0.25, 4),
        (ITL, 2.0, 1),
    ]  # four that came together, at equal distances


def test_gaps_are_those_of_a_choice() -> None:
    found = gaps(TimedRequest(2), (1.0, 0, 1), (1.5, 1, 3), (2.0, 0, 1), (2.5, 1, 0))
    assert found == [
        (ITL, 0.0, 2),
        (ITL, 1.0, 1),
    ]  # of three first tokens at once two come after another


def test_tokens_that_are_stamped_together_are_at_equal_distances() -> None:
    timed = TimedRequest(2)
    for after, choices in ((1.0, (0, 1)), (2.0, (0, 1, 0, 0, 0)), (3.0, (1,))):
        timed.clock.now = 100 + after
        for choice in choices:
            timed.timer.tokens(1, choice)
        timed.timer.stamp()
    timed.at(200.0, "stop")
    assert timed.recorder.observed == [(ITL, 0.25, 4), (ITL, 1.0, 2)]
    assert timed.timeline.completion_tokens == 8


def test_an_attempt_after_an_interruption_is_a_recovery() -> None:
    timed = TimedRequest()
    timed.timer.dispatched(Placement(prefill="p", decode="d"), 1)
    timed.timer.dispatched(Placement(prefill="p", decode="d"), 2)  # of another choice
    assert timed.recorder.added == []
    timed.timer.interrupted("crash", "d")
    timed.timer.dispatched(Placement(prefill="p", decode="e"), 3, "handoff")
    assert timed.recorder.added[1:] == [(RECOVERIES, {"kind": "handoff"})]


def test_the_table_knows_every_cause_of_an_interruption() -> None:
    assert INTERRUPTIONS.labels["cause"] == tuple(cause.name.lower() for cause in Cause)


@given(
    st.integers(0, len(STAGES)), st.lists(st.floats(0.75, 5), min_size=8, max_size=8), st.booleans()
)
def test_the_parts_add_up_wherever_it_ends(count: int, waits: list[float], retried: bool) -> None:
    timed, now = TimedRequest(), 100.0
    stages = STAGES[:count]
    for (_, event), wait in zip(
        stages + (STAGES[:3] if retried and count else []), waits * 2, strict=False
    ):
        now += wait
        timed.at(now, event)
    timed.at(now + waits[-1], "stop")
    assert sum(timed.parts()) == pytest.approx(timed.timeline.end_to_end_seconds)
    assert min(timed.parts()) >= -1e-9
