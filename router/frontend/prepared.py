"""Holds checked and tokenized requests, and resumes those that began elsewhere."""

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
    """Holds a checked request: the tokens to generate, and the form of the answer."""

    request_id: str  # as the client knows it
    model: str  # its name
    tokens: TokenRequest
    num_answers: int  # completions that are answered: the best of the generated ones
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    stop_tokens: Mapping[int, str]  # stop strings that are special tokens, so never in the text
    wants_logprobs: bool  # the client does; best_of needs them without that
    echo: str  # the prompt's text, if it is to be repeated
    is_empty: bool  # max_tokens is 0: the one token that is generated is not answered
    chat: inference_pb2.Chat | None
    quota: Quota = field(default_factory=Quota)  # it pays for the completions
    resume: ResumeBinding | None = None  # of its resume tokens or event ids; None: it has none
    has_event_ids: bool = False  # instead of resume tokens
    event: EventIdContent | None = None  # the event after which an HTTP stream is resumed
    # Of a request that began elsewhere, if the ids are known: by choice, the client's part.
    progress: Mapping[int, ChoiceProgress] = field(default_factory=dict)
    num_brought: int | None = None  # tokens that the client has, if the request began elsewhere
    cached_tokens: int | None = None  # of the prompt at first, if the request began elsewhere
    trace: TraceContext | None = None

    @property
    def marks(self) -> Mapping[int, ChoiceMark]:
        """By choice, how much the client has of the choices that are computed again."""
        return self.event.marks if self.event is not None and self.event.ids is None else {}

    @property
    def num_restored(self) -> int:
        """The number of tokens from elsewhere that are computed again with the prompt."""
        return sum(len(ids) for ids in self.tokens.emitted if ids)

    def give_back(self) -> None:
        """Takes back the count of the resumption, which the service could not begin."""
        if self.resume is not None and self.num_brought is not None:
            self.resume.policy.give_back(self.resume.answer, self.num_brought)

    @property
    def is_held(self) -> bool:
        """True if nothing is answered before all completions have ended."""
        return self.tokens.submit.num_choices > self.num_answers or self.tokens.has_beam_search


def resumed(
    prepared: PreparedRequest, given: Sequence[inference_pb2.ResumedChoice]
) -> PreparedRequest:
    """Resumes a request with the client's ids and resume tokens. Raises InvalidArgument."""
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
    """Returns the request as one that began elsewhere.

    The first resumption is served before other requests of its priority; a repetition is not.
    """
    submit = prepared.tokens.submit
    submit.sampling.seed = seed
    submit.turn = worker_pb2.TURN_FIRST_OF_PRIORITY if is_first else worker_pb2.TURN_IN_ORDER
    return replace(
        prepared,
        resume=replace(_bound(prepared), seed=seed, answer=answer),
    )


def _restored(prepared: PreparedRequest, progress: Mapping[int, ChoiceProgress]) -> PreparedRequest:
    """Returns the request with the client's part of each choice."""
    tokens = prepared.tokens
    if not prepared.is_held:  # otherwise it starts again, with the same seed
        choices = [progress.get(choice) for choice in range(tokens.submit.num_choices)]
        emitted = tuple(_emitted(each) for each in choices)
        if 0 in progress:  # the first message of choice 0 had them
            tokens.submit.ClearField("prompt_logprobs")
        tokens = replace(tokens, emitted=emitted)
    return replace(prepared, tokens=tokens, progress=progress)


def _emitted(progress: ChoiceProgress | None) -> tuple[int, ...] | None:
    """Returns the client's ids of a choice; None if the choice has ended."""
    if progress is None:
        return ()
    return None if progress.has_ended else progress.ids
