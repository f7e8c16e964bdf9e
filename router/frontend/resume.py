"""Lets a request go on at another router: signs how far each choice is, and checks what a client brings back.

A router keeps nothing for others. The client brings the token ids that it has, and the last resume token of each choice
vouches for them: it names the request, its seed, and the count and hash of the ids, under a key that all routers of a
service share. The client may read a token; it cannot change one.
"""

import hmac
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Final

from ...proto import inference_pb2
from ...proto.errors import InvalidArgument
from ...proto.hashing import hash_prompt

_VERSION: Final = 1
_DIGEST_BYTES: Final = 8  # of hashes under the MAC; whoever forges one has only made a prompt of their own choice
_MAC_BYTES: Final = 16  # of HMAC-SHA256; RFC 2104 allows half
_HEAD: Final = Struct(f"<B{_DIGEST_BYTES}sQB")  # version, digest of the request, seed, choice
_STATE: Final = Struct("<?II")  # whether the choice has ended, its tokens, prompt tokens that were cached
_MAC_START: Final = _HEAD.size + _STATE.size + _DIGEST_BYTES  # after these two the hash of the ids


class ResumeKey:
    """Holds the key of a service, and shows it to nobody."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod="sha256")  # a copy of it costs a third of hmac.digest

    def sign(self, body: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(body)
        return mac.digest()[:_MAC_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeBinding:
    """Holds what all resume tokens of one request have in common."""

    key: ResumeKey
    digest: bytes  # of the request
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProgress:
    """Holds how far a choice is, as its client and its resume token say."""

    token: bytes
    ids: tuple[int, ...]
    has_ended: bool
    cached_tokens: int  # of the prompt, when it was computed first
    seed: int


class ProgressSigner:
    """Makes the resume tokens of one choice while it is generated, each in constant time."""

    def __init__(self, binding: ResumeBinding, choice: int, emitted: Sequence[int]) -> None:
        """`emitted`: the ids that its client has already."""
        self._key = binding.key
        self._head = _HEAD.pack(_VERSION, binding.digest, binding.seed, choice)
        self._ids = blake2b(array("I", emitted), digest_size=_DIGEST_BYTES)
        self._num_tokens = len(emitted)

    def sign(self, ids: Sequence[int], has_ended: bool, cached_tokens: int) -> bytes:
        """Takes the next ids; returns the resume token after them."""
        self._ids.update(array("I", ids))
        self._num_tokens += len(ids)
        body = self._head + _STATE.pack(has_ended, self._num_tokens, cached_tokens) + self._ids.digest()
        return body + self._key.sign(body)


def digest_request(request: inference_pb2.GenerateRequest, prompt: Sequence[int], max_tokens: int, salt: str) -> bytes:
    """Returns a hash of all that the answer depends on but a random seed. `prompt` and `max_tokens` as they were
    prepared; `salt`: what else has to be the same, the model's name instead of the request's."""
    bound = inference_pb2.GenerateRequest()
    bound.CopyFrom(request)
    for name in ("model", "request_id", "priority", "resume"):
        bound.ClearField(name)
    digest = blake2b(hash_prompt(prompt, salt.encode()), digest_size=_DIGEST_BYTES)
    digest.update(max_tokens.to_bytes(8, "little"))
    digest.update(bound.SerializeToString(deterministic=True))
    return digest.digest()


def check_resume(
    given: Sequence[inference_pb2.ResumedChoice], key: ResumeKey, digest: bytes, num_choices: int
) -> dict[int, ChoiceProgress]:
    """Returns the progress of each choice that has begun. Raises InvalidArgument if the tokens are not of this service,
    this request and these ids, or of several runs of it, or if nothing is left to generate."""
    found: dict[int, ChoiceProgress] = {}
    for i, each in enumerate(given):
        choice, progress = _check_choice(each, key, digest, f"resume[{i}]")
        if choice in found:
            raise InvalidArgument(f"choice {choice} is there twice", f"resume[{i}]")
        found[choice] = progress
    if len({progress.seed for progress in found.values()}) > 1:
        raise InvalidArgument("the tokens are of several runs, with different seeds", "resume")
    if len(found) == num_choices and all(progress.has_ended for progress in found.values()):
        raise InvalidArgument("all choices have ended; nothing is left to generate", "resume")
    return found


def _check_choice(
    given: inference_pb2.ResumedChoice, key: ResumeKey, digest: bytes, field: str
) -> tuple[int, ChoiceProgress]:
    token, name = given.resume_token, f"{field}.resume_token"
    body = token[:_MAC_START]
    if len(token) != _MAC_START + _MAC_BYTES or not hmac.compare_digest(token[_MAC_START:], key.sign(body)):
        raise InvalidArgument("is no resume token of this service", name)
    version, found_digest, seed, choice = _HEAD.unpack_from(body)
    if version != _VERSION:
        raise InvalidArgument("is of another version of the service", name)
    if found_digest != digest:
        raise InvalidArgument("belongs to another request: prompt or parameters differ", name)
    has_ended, num_tokens, cached_tokens = _STATE.unpack_from(body, _HEAD.size)
    ids = tuple(given.token_ids)
    if len(ids) != num_tokens:
        raise InvalidArgument(f"has {len(ids)} ids; the resume token is of {num_tokens}", f"{field}.token_ids")
    if blake2b(array("I", ids), digest_size=_DIGEST_BYTES).digest() != body[-_DIGEST_BYTES:]:
        raise InvalidArgument("are not the ids that were sent", f"{field}.token_ids")
    return choice, ChoiceProgress(token=token, ids=ids, has_ended=has_ended, cached_tokens=cached_tokens, seed=seed)
