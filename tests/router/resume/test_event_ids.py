"""Tests the signing of event ids apart from a stream."""

from tandem.router.resume.event_ids import EventIdSigner, check_event_id
from tandem.router.resume.policy import ResumePolicy
from tandem.router.resume.tokens import ResumeBinding, ResumeKey

BINDING = ResumeBinding(
    began=0,
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
