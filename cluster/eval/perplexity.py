"""Computes the perplexity of a text from prompt log probabilities over sliding windows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from ...proto import limits
from ...proto.errors import InternalError, InvalidArgument
from ...router.client.types import Completion, ModelInfo, Options
from .gather import map_concurrently

Window = tuple[int, int, int]
"""The tokens of one forward pass: their start and end in the text, and the first scored token."""


class ScoringClient(Protocol):
    """The methods of AsyncClient that score a text."""

    async def tokenize(self, prompt: str, *, model: str = "") -> list[int]: ...

    async def list_models(self) -> list[ModelInfo]: ...

    async def generate(self, prompt: Sequence[int], **options: Unpack[Options]) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Holds the scores of a text, in natural logarithms except for the bits."""

    num_tokens: int  # of the text; the first has no context and is not scored
    num_windows: int
    nll: float  # negative log likelihood of all scored tokens together
    num_scored: int
    num_bytes: int  # of the text in UTF-8

    @property
    def mean_nll(self) -> float:
        return self.nll / self.num_scored

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def bits_per_byte(self) -> float:
        """Returns a score that does not depend on the tokenizer (Gao et al., 2020, The Pile)."""
        return self.nll / math.log(2) / self.num_bytes


def sliding_windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Returns windows of `window` tokens, `stride` apart; the last ends with the text.

    Each token is scored in the first window that contains it, after at least `window - stride`
    tokens if the text has them. A token that begins its window is not scored: the first token of
    the text, and with a stride of a whole window the first of each.

    This is the method of "Perplexity of fixed-length models" in transformers' documentation, except
    that its example counts one token too few of each window but the first in the mean. Raises
    InvalidArgument.
    """
    if window < 2:
        raise InvalidArgument("must be at least 2 tokens", "window")
    if not 1 <= stride <= window:
        raise InvalidArgument(f"must be from 1 to the window's {window} tokens", "stride")
    starts = range(0, max(num_tokens - window, 0) + stride, stride)
    ends = [min(start + window, num_tokens) for start in starts]
    return [
        (start, end, max(last, start + 1))
        for start, end, last in zip(starts, ends, [0, *ends[:-1]], strict=True)
    ]


async def measure_perplexity(
    client: ScoringClient,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    model: str = "",
    concurrency: int = 4,
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Scores `text` through a client.

    `window`: tokens, at most and by default one less than the model's context, since a prompt must
    leave one token to generate. `stride`: by default half a window. Calls `on_window(finished
    windows, all windows)` after each. Raises a TandemError.
    """
    longest = await _context_tokens(client, model) - 1
    window = window or longest
    if window > longest:
        raise InvalidArgument(
            f"must be at most {longest} tokens, one less than the model's context", "window"
        )
    ids = await tokenize_long(client, text, model)
    if len(ids) < 2:
        raise InvalidArgument("has fewer than two tokens", "text")
    windows = sliding_windows(len(ids), window, stride or max(window // 2, 1))
    done = 0

    async def score(one: Window) -> float:
        nonlocal done
        scored = await _score(client, ids, one, model)
        done += 1
        on_window(done, len(windows))
        return scored

    nlls = await map_concurrently(score, windows, concurrency)
    return Perplexity(
        num_tokens=len(ids),
        num_windows=len(windows),
        nll=math.fsum(nlls),
        num_scored=sum(end - score_from for _, end, score_from in windows),
        num_bytes=len(text.encode()),
    )


async def tokenize_long(client: ScoringClient, text: str, model: str) -> list[int]:
    """Returns the token ids of a text of any length.

    Sends a text that is longer than the service accepts in pieces, which end at line ends if
    possible. Keeps special tokens before a text for the first piece only.
    """
    pieces = _pieces(text, limits.MAX_PROMPT_CHARACTERS)
    ids = await client.tokenize(pieces[0], model=model)
    if len(pieces) > 1:
        a = await client.tokenize("a", model=model)
        b = await client.tokenize("b", model=model)
        num_special = next(
            i for i, pair in enumerate(zip([*a, -1], [*b, -2], strict=False)) if pair[0] != pair[1]
        )
        for piece in pieces[1:]:
            ids += (await client.tokenize(piece, model=model))[num_special:]
    return ids


def _pieces(text: str, most: int) -> list[str]:
    pieces = []
    while len(text) > most:
        end = text.rfind("\n", 0, most) + 1 or most
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


async def _context_tokens(client: ScoringClient, model: str) -> int:
    """Returns the context of a model.

    A name that is not listed may be a path of the first model; `tokenize` refuses any other.
    """
    models = await client.list_models()
    return next((each for each in models if each.id == model), models[0]).context_tokens


async def _score(client: ScoringClient, ids: Sequence[int], window: Window, model: str) -> float:
    """Returns the negative log likelihood of the window's scored tokens."""
    begin, end, score_from = window
    answer = await client.generate(ids[begin:end], max_tokens=0, prompt_logprobs=0, model=model)
    found = [each.token.logprob for each in answer.prompt_logprobs[score_from - begin :]]
    numbers = [each for each in found if each is not None]
    if len(numbers) != end - score_from:
        raise InternalError(
            "the service did not return a log probability for every token of the prompt"
        )
    return -math.fsum(numbers)
