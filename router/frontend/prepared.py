"""Holds checked and tokenized requests, and resumes those that began elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...proto import inference_pb2, worker_pb2
from ..auth.rate import Quota
from ..request import TokenRequest
from ..resume.event_ids import begin_of_event, check_event_id
from ..resume.tokens import (
    AnswerBegin,
    ChoiceMark,
    ChoiceProgress,
    ResumeBinding,
    ResumedAnswer,
    ResumeKey,
    begin_of_token,
    check_resume,
)
from ..slo import RequestSlo
from ..stopping.rules import StopRules
from ..telemetry.trace import TraceContext
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Holds a checked request: the tokens to generate, and the form of the answer."""

    request_id: str  # as the client knows it
    model: str  # its name
    tokens: TokenRequest
    num_returned: int  # completions that are answered: the best of the generated ones
    tokenizer: Tokenizer
    stops: StopRules
    wants_logprobs: bool  # the client does; best_of needs them without that
    echo: str  # the prompt's text, if it is to be repeated
    is_empty: bool  # max_tokens is 0: the one token that is generated is not answered
    chat: inference_pb2.Chat | None
    quota: Quota = field(default_factory=Quota)  # it pays for the completions
    resume: ResumeBinding | None = None  # of its resume tokens or event ids; None: it has none
    has_event_ids: bool = False  # instead of resume tokens
    begun: ResumedAnswer | None = None  # the client's part, if the request began elsewhere
    dropped_messages: int = 0  # of the chat, by `truncation`
    trace: TraceContext | None = None
    slo: RequestSlo | None = None
    key_name: str = ""  # of the caller's key

    @property
    def progress(self) -> Mapping[int, ChoiceProgress]:
        """By choice, the client's part of a request that began elsewhere, if its ids are known."""
        return {} if self.begun is None else self.begun.progress

    @property
    def marks(self) -> Mapping[int, ChoiceMark]:
        """By choice, how much the client has of the choices that are computed again."""
        return {} if self.begun is None else self.begun.marks

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of the prompt when it was first computed; None if that is now."""
        return None if self.begun is None else self.begun.cached_tokens

    @property
    def num_restored(self) -> int:
        """The number of tokens from elsewhere that are computed again with the prompt."""
        return sum(len(ids) for ids in self.tokens.emitted if ids)

    def give_back(self) -> None:
        """Takes back the count of the resumption, which the service could not begin."""
        if self.resume is not None and self.begun is not None:
            self.resume.policy.give_back(self.resume.answer, self.begun.num_tokens)

    @property
    def is_held(self) -> bool:
        """True if nothing is answered before all completions have ended."""
        return self.tokens.submit.num_choices > self.num_returned or self.tokens.has_beam_search


def begin_of(
    given: Sequence[inference_pb2.ResumedChoice],
    event_id: str | None,
    key: ResumeKey | None,
) -> AnswerBegin | None:
    """Returns the begin of a resumed answer; None if the answer is new.

    Tokens that `resumed` will refuse count as a new answer. Raises InvalidArgument if the event id
    belongs to another service.
    """
    if key is not None and event_id:
        return begin_of_event(event_id, key)
    if key is not None and given:
        return begin_of_token(given[0].resume_token, key)
    return None


def resumed(
    prepared: PreparedRequest, given: Sequence[inference_pb2.ResumedChoice], event_id: str
) -> PreparedRequest:
    """Resumes a request with the client's resume tokens, or after an event of an HTTP stream.

    The first resumption is served before other requests of its priority; a repetition is not.
    Raises InvalidArgument if the tokens or the event id are not valid.
    """
    binding = prepared.resume
    assert binding is not None
    if event_id:
        begun = check_event_id(event_id, binding, prepared.num_returned)
    else:
        begun = check_resume(given, binding, prepared.num_returned)
    is_first = binding.policy.use(begun.answer, begun.num_tokens, "resume")
    tokens = prepared.tokens
    submit = tokens.submit
    submit.sampling.seed = begun.seed
    submit.turn = worker_pb2.TURN_FIRST_OF_PRIORITY if is_first else worker_pb2.TURN_IN_ORDER
    if begun.progress and not prepared.is_held:  # otherwise it starts again, with the same seed
        choices = map(begun.progress.get, range(submit.num_choices))
        tokens = replace(tokens, emitted=tuple(_emitted(each) for each in choices))
        if 0 in begun.progress:  # the first message of choice 0 had them
            submit.ClearField("prompt_logprobs")
    if tokens.ends_at is not None:  # the time counts from the arrival at the first router
        spent = max(binding.began - begun.began, 0) / 1000
        tokens = replace(tokens, ends_at=tokens.ends_at - spent)
    binding = replace(binding, seed=begun.seed, answer=begun.answer, began=begun.began)
    return replace(prepared, tokens=tokens, resume=binding, begun=begun)


def _emitted(progress: ChoiceProgress | None) -> tuple[int, ...] | None:
    """Returns the client's ids of a choice; None if the choice has ended."""
    if progress is None:
        return ()
    return None if progress.has_ended else progress.ids
