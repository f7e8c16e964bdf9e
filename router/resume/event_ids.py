"""Signs the ids of the events of an HTTP stream, and checks the id that a client brings back.

An HTTP client has texts, not token ids. So an event id holds the token ids of all choices while
they are few. Beyond MAX_ID_BYTES it holds only the count and a hash of the ids of each choice. The
router that resumes then has the answer computed again, and sends the part after these counts; the
hashes show that it is the same answer. So all event ids together are a few times as long as the
events.
"""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from struct import Struct
from typing import Any, Final

from ...proto.errors import InternalError, InvalidArgument
from .tokens import (
    AnswerBegin,
    ChoiceMark,
    ChoiceProgress,
    ResumeBinding,
    ResumedAnswer,
    ResumeKey,
    check_unfinished,
)

MAX_ID_BYTES: Final = 512  # of token ids within an event id
MAX_EVENT_ID_CHARACTERS: Final = 4_096
"""An event id of 32 choices has at most a third of that."""

FIELD: Final = "resume"
"""The event id in errors; HTTP names the header or the field of the body instead."""

_VERSION: Final = 131  # differs from the version of resume tokens, which have the same key
_HASH_BYTES: Final = 4  # enough to notice another answer; the signature keeps clients from forging
# Version, request, seed, answer, its begin in milliseconds, its context, time, cached tokens,
# choices.
_HEAD: Final = Struct("<B8sQ8sqIIIB")
_BEGIN: Final = slice(4, 6)  # its place there
_CHOICE: Final = Struct(f"<BI{_HASH_BYTES}s")  # number, 2 * tokens + 1 if ended, hash of ids
_OTHER_ANSWER: Final = "this answer cannot be computed again as it was; send the request without it"


@dataclass(slots=True)
class _Choice:
    """Counts and hashes the ids that the client has of one choice."""

    num_tokens: int = 0
    has_ended: bool = False
    ids: Any = field(default_factory=lambda: blake2b(digest_size=_HASH_BYTES))

    def add(self, ids: Sequence[int], has_ended: bool) -> bytes:
        """Adds the next ids; returns them as bytes."""
        packed = b"".join(map(_pack, ids))
        self.ids.update(packed)
        self.num_tokens += len(ids)
        self.has_ended = has_ended
        return packed

    @property
    def mark(self) -> ChoiceMark:
        """The progress of the client, without the ids."""
        digest = self.ids.digest()
        return ChoiceMark(num_tokens=self.num_tokens, has_ended=self.has_ended, digest=digest)


class EventIdSigner:
    """Makes the id of each event of one answer."""

    def __init__(self, binding: ResumeBinding, resumed: ResumedAnswer | None) -> None:
        self._binding = binding
        self._resumed = resumed
        self._choices: dict[int, _Choice] = {}
        self._carried: dict[int, bytearray] | None = {}  # ids by choice; None: too many
        self._marks: dict[int, ChoiceMark] = {}  # of choices that are computed again
        if resumed is None:
            return
        for number, progress in resumed.progress.items():
            self._add(number, progress.ids, progress.has_ended)
        self._marks |= {n: mark for n, mark in resumed.marks.items() if mark.num_tokens}

    def take(
        self, number: int, ids: Sequence[int], has_ended: bool, *, is_late: bool = False
    ) -> bool:
        """Adds the next ids of a choice; returns True if the client has them already.

        `is_late`: the time of the answer has ended the choice. That may be before the place of the
        client, whose tokens have to be computed again.

        Raises InternalError if an answer that is computed again differs from the client's.
        """
        self._add(number, ids, has_ended)
        mark = self._marks.get(number)
        choice = self._choices[number]
        if mark is None:
            return False
        if choice.num_tokens < mark.num_tokens and not has_ended:
            return True
        if choice.num_tokens < mark.num_tokens and is_late:
            self._marks[number] = replace(mark, has_ended=True)
            return False
        del self._marks[number]
        if choice.mark != mark:
            raise InternalError(_OTHER_ANSWER)
        return True

    def sign(self, cached_tokens: int) -> bytes:
        """Returns the id of the event that ends with the last ids.

        `cached_tokens`: of the prompt, as it was computed now; a resumed answer keeps its own.
        """
        binding = self._binding
        marks = {number: each.mark for number, each in self._choices.items()} | self._marks
        body = _HEAD.pack(
            _VERSION,
            binding.digest,
            binding.seed,
            binding.answer,
            binding.began,
            binding.context_tokens,
            binding.policy.now(),
            cached_tokens if self._resumed is None else self._resumed.cached_tokens,
            len(marks),
        )
        body += b"".join(
            _CHOICE.pack(number, 2 * mark.num_tokens + mark.has_ended, mark.digest)
            for number, mark in marks.items()
        )
        if self._carried is not None and not self._marks:
            body += b"".join(self._carried[number] for number in marks)
        return urlsafe_b64encode(body + binding.key.sign(body))

    def _add(self, number: int, ids: Sequence[int], has_ended: bool) -> None:
        packed = self._choices.setdefault(number, _Choice()).add(ids, has_ended)
        if self._carried is not None:
            self._carried.setdefault(number, bytearray()).extend(packed)
            if sum(map(len, self._carried.values())) > MAX_ID_BYTES:
                self._carried = None


def check_event_id(event_id: str, binding: ResumeBinding, num_choices: int) -> ResumedAnswer:
    """Returns the answer with the choices that had begun at the event.

    Raises InvalidArgument if the id has expired or belongs to another service or request, or if
    nothing is left to generate.
    """
    body = _signed_part(event_id, binding.key)
    version, digest, seed, answer, began, _, signed, cached_tokens, num_begun = _HEAD.unpack_from(
        body
    )
    binding.check(is_same_version=version == _VERSION, digest=digest, signed=signed, field=FIELD)
    end = _HEAD.size + num_begun * _CHOICE.size
    marks = {}
    for number, state, ids_digest in _CHOICE.iter_unpack(body[_HEAD.size : end]):
        marks[number] = ChoiceMark(
            num_tokens=state // 2, has_ended=bool(state % 2), digest=ids_digest
        )
    check_unfinished([mark.has_ended for mark in marks.values()], num_choices)
    resumed = ResumedAnswer(
        answer=answer, began=began, seed=seed, cached_tokens=cached_tokens, marks=marks
    )
    packed = body[end:]
    if not packed and resumed.num_tokens:  # the ids were too many
        return resumed
    ids = _unpack(packed)
    progress = {
        number: ChoiceProgress(ids=tuple(islice(ids, mark.num_tokens)), has_ended=mark.has_ended)
        for number, mark in marks.items()
    }
    return replace(resumed, progress=progress, marks={})


def begin_of_event(event_id: str, key: ResumeKey) -> AnswerBegin | None:
    """Returns the begin of an event id's answer; None for another version of the service.

    Raises InvalidArgument if the id belongs to another service.
    """
    body = _signed_part(event_id, key)
    return AnswerBegin(*_HEAD.unpack_from(body)[_BEGIN]) if body[0] == _VERSION else None


def _signed_part(event_id: str, key: ResumeKey) -> bytes:
    body = None
    if len(event_id) <= MAX_EVENT_ID_CHARACTERS:
        with suppress(ValueError):  # not in base64, for which binascii.Error is raised
            body = key.signed_part(b64decode(event_id, "-_", validate=True))
    if not body or len(body) < _HEAD.size:
        raise InvalidArgument("is not an event id of this service", FIELD)
    return body


def _pack(token: int) -> bytes:
    """Returns an id as protobuf's varint: most take two or three bytes."""
    packed = bytearray()
    while token > 127:
        packed.append(token & 127 | 128)
        token >>= 7
    packed.append(token)
    return bytes(packed)


def _unpack(packed: bytes) -> Iterator[int]:
    token = shift = 0
    for byte in packed:
        token |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield token
            token = shift = 0
