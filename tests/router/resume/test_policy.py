"""How long and how often an answer is resumed."""

import pytest

from tandem.proto.errors import InvalidArgument
from tandem.router.resume import policy as resume_policy
from tandem.router.resume.policy import MAX_USES, ResumePolicy

ANSWER = b"answer 1"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def policy_of(clock: Clock) -> ResumePolicy:
    return ResumePolicy(600, wall_clock=clock, clock=clock)


def test_what_is_too_old_is_refused_and_a_clock_that_is_ahead_is_not() -> None:
    clock = Clock()
    policy = policy_of(clock)
    for signed in (400, 1000, 1030):
        policy.check_age(signed, "resume")
    with pytest.raises(InvalidArgument, match="resume: has expired after 600 seconds"):
        policy.check_age(399, "resume")


def test_each_place_is_used_a_few_times_and_an_answer_goes_ahead_once() -> None:
    clock = Clock()
    policy = policy_of(clock)
    firsts = [policy.use(ANSWER, place, "resume") for place in (5, 9, 7) for _ in range(MAX_USES)]
    assert firsts == [True] + [False] * (3 * MAX_USES - 1)
    for place in (5, 7, 9):
        with pytest.raises(InvalidArgument, match="resume: was used 3 times"):
            policy.use(ANSWER, place, "resume")
    assert policy.use(b"answer 2", 5, "resume")
    clock.now += 601  # no token of theirs is valid any more
    assert policy.use(ANSWER, 5, "resume")


def test_what_could_not_begin_is_given_back() -> None:
    policy = policy_of(Clock())
    for _ in range(2 * MAX_USES):
        assert policy.use(ANSWER, 5, "resume")
        policy.give_back(ANSWER, 5)
    policy.give_back(ANSWER, 5)
    policy.give_back(b"answer 2", 5)
    assert [policy.use(ANSWER, 5, "resume") for _ in range(MAX_USES)] == [True, False, False]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_policy, "_MAX_PLACES", 4)
    policy = policy_of(Clock())
    for number in range(100):
        policy.use(number.to_bytes(8, "little"), 1, "resume")
    assert (len(policy._uses), len(policy._resumed)) == (4, 4)
    assert not policy.use((99).to_bytes(8, "little"), 1, "resume"), "the last ones are known"
