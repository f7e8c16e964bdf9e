"""Tests the signing of event ids apart from a stream."""

import pytest

from tandem.proto.errors import InternalError
from tandem.router.resume import event_ids
from tandem.router.resume.event_ids import EventIdSigner, check_event_id
from tandem.router.resume.policy import ResumePolicy
from tandem.router.resume.tokens import ResumeBinding, ResumeKey

BINDING = ResumeBinding(
    began=0,
    context_tokens=512,
    key=ResumeKey(b"k" * 32),
    policy=ResumePolicy(),
    digest=b"d" * 8,
    seed=7,
    answer=b"a" * 8,
)


def test_an_answer_keeps_its_cached_tokens_however_often_it_is_resumed() -> None:
    """A router that resumes finds the answer itself in its cache, which is not the prompt's."""
    signer = EventIdSigner(BINDING, None)
    for cached_now in (16, 48, 64):
        signer.take(0, [5], False)
        resumed = check_event_id(signer.sign(cached_now).decode(), BINDING, 1)
        assert resumed.cached_tokens == 16
        signer = EventIdSigner(BINDING, resumed)
    assert resumed.progress[0].ids == (5, 5, 5)


def test_a_choice_may_end_before_the_place_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may not suffice to compute again what the client has; the client gets the end."""
    monkeypatch.setattr(event_ids, "MAX_ID_BYTES", 0)  # the ids have counts only
    signer = EventIdSigner(BINDING, None)
    signer.take(0, [5, 6, 7], False)
    signer.take(1, [8], False)
    resumed = check_event_id(signer.sign(0).decode(), BINDING, 2)
    signer = EventIdSigner(BINDING, resumed)
    assert signer.take(0, [5, 6], False)
    assert not signer.take(0, [], True, is_late=True)
    assert signer.take(1, [8], False)
    assert not signer.take(1, [9], False)
    marks = check_event_id(signer.sign(0).decode(), BINDING, 2).marks
    assert [(each.num_tokens, each.has_ended) for each in marks.values()] == [(3, True), (2, False)]
    other = EventIdSigner(BINDING, resumed)
    with pytest.raises(InternalError, match="cannot be computed again"):
        other.take(0, [5, 6], True)
