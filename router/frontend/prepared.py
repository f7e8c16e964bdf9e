"""Holds requests that are checked and tokenized, and resumes those that have begun elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...proto import inference_pb2, worker_pb2
from ..auth.rate import Quota
from ..request import TokenRequest
from ..resume.event_ids import ChoiceMark, EventIdContent, check_event_id
from ..resume.tokens import ChoiceProgress, ResumeBinding, check_resume
from ..telemetry.trace import TraceContext
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Holds a checked request: what is generated, and how it is answered."""

    request_id: str  # as the client knows it
    model: str  # its name
    tokens: TokenRequest
    num_answers: int  # completions to answer, the best of those generated
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    stop_tokens: Mapping[
        int, str
    ]  # stop strings that are special tokens, by token: they never are in the text
    wants_logprobs: bool  # the client; ranking by best_of needs them, too
    echo: str  # the prompt's text, if it is to be repeated
    is_empty: bool  # max_tokens is 0: the one token that is generated is not answered
    chat: inference_pb2.Chat | None
    quota: Quota = field(default_factory=Quota)  # that the completions count against
    resume: ResumeBinding | None = (
        None  # what its resume tokens or event ids bind; None: it has none
    )
    has_event_ids: bool = False  # instead of resume tokens
    event: EventIdContent | None = None  # after which it is resumed; of an HTTP stream
    # By choice, what the client has, if it was begun elsewhere and the ids are known; others are in
    # `event`.
    progress: Mapping[int, ChoiceProgress] = field(default_factory=dict)
    num_brought: int | None = (
        None  # tokens that the client has of an answer that was begun elsewhere
    )
    cached_tokens: int | None = (
        None  # of the prompt when it was computed first, if that was elsewhere
    )
    trace: TraceContext | None = None

    @property
    def marks(self) -> Mapping[int, ChoiceMark]:
        """By choice, how much the client has of what is to be computed again."""
        return self.event.marks if self.event is not None and self.event.ids is None else {}

    @property
    def num_restored(self) -> int:
        """Tokens that were generated elsewhere and are computed again as a part of the prompt."""
        return sum(len(ids) for ids in self.tokens.emitted if ids)

    def give_back(self) -> None:
        """Has the resumption not count, since the service could not begin with it."""
        if self.resume is not None and self.num_brought is not None:
            self.resume.policy.give_back(self.resume.answer, self.num_brought)

    @property
    def is_held(self) -> bool:
        """Whether nothing is answered before all completions have ended."""
        return self.tokens.submit.num_choices > self.num_answers or self.tokens.has_beam_search


def resumed(
    prepared: PreparedRequest, given: Sequence[inference_pb2.ResumedChoice]
) -> PreparedRequest:
    """Resumes a request with the ids and the resume tokens that its client brings. Raises
    InvalidArgument."""
    binding = _bound(prepared)
    key, policy = binding.key, binding.policy
    found = check_resume(given, key, policy, binding.digest, prepared.num_answers)
    num_tokens = sum(len(each.ids) for each in found.choices.values())
    is_first = policy.use(found.answer, num_tokens, "resume")
    begun = replace(
        _begun(prepared, found.answer, found.seed, is_first=is_first),
        num_brought=num_tokens,
        cached_tokens=found.cached_tokens,
    )
    return _restored(begun, found.choices)


def resumed_after_event(prepared: PreparedRequest, event_id: str) -> PreparedRequest:
    """Resumes a request after an event of an HTTP stream. Raises InvalidArgument."""
    binding = _bound(prepared)
    key, policy = binding.key, binding.policy
    found = check_event_id(event_id, key, policy, binding.digest, prepared.num_answers)
    num_tokens = sum(mark.num_tokens for mark in found.marks.values())
    is_first = policy.use(found.answer, num_tokens, "resume")
    begun = replace(
        _begun(prepared, found.answer, found.seed, is_first=is_first),
        num_brought=num_tokens,
        cached_tokens=found.cached_tokens,
        event=found,
    )
    if found.ids is None:
        return begun
    progress = {
        number: ChoiceProgress(ids=ids, has_ended=found.marks[number].has_ended)
        for number, ids in found.ids.items()
    }
    return _restored(begun, progress)


def _bound(prepared: PreparedRequest) -> ResumeBinding:
    assert prepared.resume is not None
    return prepared.resume


def _begun(
    prepared: PreparedRequest, answer: bytes, seed: int, *, is_first: bool
) -> PreparedRequest:
    """Returns the request as one that has begun elsewhere. Its first resumption goes ahead of the
    requests of its priority; whoever repeats it waits as others do."""
    submit = prepared.tokens.submit
    submit.sampling.seed = seed
    submit.turn = worker_pb2.TURN_FIRST_OF_PRIORITY if is_first else worker_pb2.TURN_IN_ORDER
    return replace(
        prepared,
        resume=replace(_bound(prepared), seed=seed, answer=answer),
    )


def _restored(prepared: PreparedRequest, progress: Mapping[int, ChoiceProgress]) -> PreparedRequest:
    """Returns the request with what its client has of each choice."""
    tokens = prepared.tokens
    if not prepared.is_held:  # else it starts again, with the same seed
        choices = [progress.get(choice) for choice in range(tokens.submit.num_choices)]
        emitted = tuple(
            () if each is None else None if each.has_ended else each.ids for each in choices
        )
        if 0 in progress:  # the first message of choice 0 had them
            tokens.submit.ClearField("prompt_logprobs")
        tokens = replace(tokens, emitted=emitted)
    return replace(prepared, tokens=tokens, progress=progress)
