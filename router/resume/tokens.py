"""Signs the progress of each choice, so that a request can go on at another router, and checks it.

A router keeps nothing for other routers. The client brings the token ids that it has, and the last
resume token of each choice proves them: it names the request, its seed, and the count and hash of
the ids, under a key that all routers of a service share. A client can read a token but not change
it. A token expires some time after it was signed, and names its answer, whose resumptions each
router counts (policy.py).
"""

import hmac
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument
from ...proto.hashing import hash_prompt
from .policy import ResumePolicy

_VERSION: Final = 4
# Of hashes under the MAC. A client that forges one only gets the answer to another prompt.
_DIGEST_BYTES: Final = 8
MAC_BYTES: Final = 16  # of HMAC-SHA256; RFC 2104 allows half
ANSWER_BYTES: Final = 8  # random
# Version, digest of the request, seed, answer, its begin in milliseconds, its context, choice.
_HEAD: Final = Struct(f"<B{_DIGEST_BYTES}sQ{ANSWER_BYTES}sqIB")
_BEGIN: Final = slice(4, 6)  # its place there
# True if the choice has ended, its tokens, cached tokens of the prompt, the time in seconds.
_STATE: Final = Struct("<?III")
_MAC_START: Final = _HEAD.size + _STATE.size + _DIGEST_BYTES  # the hash of the ids comes last


# Fields that may differ in the request for the rest of an answer, because they do not change it.
_FREE_FIELDS: Final = (
    "model",
    "request_id",
    "priority",
    "service_tier",
    "resume",
    "prompt_cache_key",
    "prompt_cache_retention",
    "cache_breakpoints",
    "only_cache_breakpoints",
)


class AnswerBegin(NamedTuple):
    """Holds what every router that resumes an answer needs before it prepares the request."""

    began: int  # when the first router had the request, in milliseconds of ResumePolicy's clock
    # That prompt and completion had to fit. The workers may hold less or more by now.
    context_tokens: int


class ResumeKey:
    """Holds the secret key of a service."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")  # a copy of it costs a third of hmac.digest

    def sign(self, body: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(body)
        return mac.digest()[:MAC_BYTES]

    def signed_part(self, token: bytes) -> bytes | None:
        """Returns the bytes before the signature at the end; None if another key signed them."""
        body = token[:-MAC_BYTES]
        return body if hmac.compare_digest(token[-MAC_BYTES:], self.sign(body)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBinding:
    """Holds the data that all resume tokens of one request share."""

    key: ResumeKey
    policy: ResumePolicy
    digest: bytes  # of the request
    seed: int
    answer: bytes  # a random name of the answer, which it keeps at every router
    began: int  # see AnswerBegin
    context_tokens: int  # likewise

    def check(self, *, is_same_version: bool, digest: bytes, signed: int, field: str) -> None:
        """Raises InvalidArgument for a token of another version or request, or one too old."""
        if not is_same_version:
            raise InvalidArgument("belongs to another version of the service", field)
        if digest != self.digest:
            raise InvalidArgument("belongs to another request: prompt or parameters differ", field)
        self.policy.check_age(signed, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """Holds the part of a choice that its client has, proved by a resume token or event id."""

    ids: tuple[int, ...]
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceMark:
    """Holds how much of a choice the client has, without its ids."""

    num_tokens: int
    has_ended: bool
    digest: bytes  # of the ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedAnswer:
    """Holds an answer that its client has begun to receive."""

    answer: bytes  # as in ResumeBinding
    began: int  # likewise
    seed: int
    cached_tokens: int  # of the prompt, when it was first computed
    # By number, the choices that have begun: in `progress` if their ids are known, else in `marks`.
    progress: Mapping[int, ChoiceProgress] = field(default_factory=dict)
    marks: Mapping[int, ChoiceMark] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the client has."""
        known = sum(len(each.ids) for each in self.progress.values())
        return known + sum(each.num_tokens for each in self.marks.values())


class ProgressSigner:
    """Makes the resume tokens of one choice while it is generated, each in constant time."""

    def __init__(self, binding: ResumeBinding, choice: int, emitted: Sequence[int]) -> None:
        """`emitted`: the ids that the client has already."""
        self._key = binding.key
        self._now = binding.policy.now
        self._head = _HEAD.pack(
            _VERSION,
            binding.digest,
            binding.seed,
            binding.answer,
            binding.began,
            binding.context_tokens,
            choice,
        )
        self._ids = blake2b(array("I", emitted), digest_size=_DIGEST_BYTES)
        self._num_tokens = len(emitted)

    def sign(self, ids: Sequence[int], has_ended: bool, cached_tokens: int) -> bytes:
        """Returns the resume token after the next ids."""
        self._ids.update(array("I", ids))
        self._num_tokens += len(ids)
        state = _STATE.pack(has_ended, self._num_tokens, cached_tokens, self._now())
        body = self._head + state + self._ids.digest()
        return body + self._key.sign(body)


def digest_request(
    request: inference_pb2.GenerateRequest, prompt: Sequence[int], max_tokens: int, salt: str
) -> bytes:
    """Returns a hash of everything that determines the answer, except a random seed.

    `prompt` and `max_tokens` belong to the prepared request. `salt`: further text that must be
    the same; it has the model's name, which the request may leave out.
    """
    bound = inference_pb2.GenerateRequest()
    bound.CopyFrom(request)
    for name in _FREE_FIELDS:
        bound.ClearField(name)
    digest = blake2b(hash_prompt(prompt, salt.encode()), digest_size=_DIGEST_BYTES)
    digest.update(max_tokens.to_bytes(8, "little"))
    digest.update(bound.SerializeToString(deterministic=True))
    return digest.digest()


def check_resume(
    given: Sequence[inference_pb2.ResumedChoice], binding: ResumeBinding, num_choices: int
) -> ResumedAnswer:
    """Returns the answer with each choice that has begun; `given` has at least one.

    Raises InvalidArgument if a token has expired or belongs to another service, request or ids, if
    the tokens are of several runs of the request, or if nothing is left to generate.
    """
    found = [_check_choice(each, binding, f"resume[{i}]") for i, each in enumerate(given)]
    progress: dict[int, ChoiceProgress] = {}
    for i, answer in enumerate(found):
        (choice,) = answer.progress
        if choice in progress:
            raise InvalidArgument(f"choice {choice} occurs twice", f"resume[{i}]")
        progress |= answer.progress
    if len({(answer.answer, answer.seed) for answer in found}) > 1:
        raise InvalidArgument("the tokens are of several runs of the request", "resume")
    check_unfinished([each.has_ended for each in progress.values()], num_choices)
    return replace(found[0], progress=progress)


def begin_of_token(token: bytes, key: ResumeKey) -> AnswerBegin | None:
    """Returns the begin of a resume token's answer; None if `check_resume` will refuse it."""
    body = key.signed_part(token)
    if not body or body[0] != _VERSION:
        return None
    return AnswerBegin(*_HEAD.unpack_from(body)[_BEGIN])


def check_unfinished(ended: Sequence[bool], num_choices: int) -> None:
    """Raises InvalidArgument if all of `num_choices` choices have begun and ended."""
    if len(ended) == num_choices and all(ended):
        raise InvalidArgument("all choices have ended; nothing is left to generate", "resume")


def _check_choice(
    given: inference_pb2.ResumedChoice, binding: ResumeBinding, field: str
) -> ResumedAnswer:
    """Returns the answer with one choice."""
    token = given.resume_token
    body = binding.key.signed_part(token)
    if body is None or len(token) != _MAC_START + MAC_BYTES:
        raise InvalidArgument("is not a resume token of this service", f"{field}.resume_token")
    version, digest, seed, answer, began, _, choice = _HEAD.unpack_from(body)
    has_ended, num_tokens, cached_tokens, signed = _STATE.unpack_from(body, _HEAD.size)
    binding.check(
        is_same_version=version == _VERSION,
        digest=digest,
        signed=signed,
        field=f"{field}.resume_token",
    )
    ids = tuple(given.token_ids)
    if len(ids) != num_tokens:
        raise InvalidArgument(
            f"has {len(ids)} ids; the resume token is for {num_tokens}", f"{field}.token_ids"
        )
    if blake2b(array("I", ids), digest_size=_DIGEST_BYTES).digest() != body[-_DIGEST_BYTES:]:
        raise InvalidArgument("are not the ids that were sent", f"{field}.token_ids")
    progress = {choice: ChoiceProgress(ids=ids, has_ended=has_ended)}
    return ResumedAnswer(
        answer=answer, began=began, seed=seed, cached_tokens=cached_tokens, progress=progress
    )
