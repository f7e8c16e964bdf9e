"""Makes the prompts and arrival times of a benchmark from a seed."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...proto.errors import InvalidArgument
from .options import LoadOptions, Workload

_PREFIX, _WARMUP, _ROUNDS = range(3)  # streams of random numbers of one seed


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """Holds one request to send."""

    content: str | list[int]  # text or token ids
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes the prompts of a benchmark; the same seed gives the same prompts."""

    workload: Workload
    lines: tuple[BenchPrompt, ...] = ()  # of a file

    def warmup(self) -> Iterator[BenchPrompt]:
        """Yields prompts without end, other than those of the rounds unless they come from a file."""
        return self._endless(_WARMUP)

    def of_round(self, number: int, load: LoadOptions) -> Iterator[BenchPrompt]:
        """Returns the prompts of round `number`, from 0 up; each round has others unless they come from a file.

        If their number is known they are made before the round begins, so that this takes none of its time."""
        endless = self._endless(_ROUNDS + number)
        if load.num_prompts is None:
            return endless if load.seconds is not None else iter(self.lines)
        return iter(list(itertools.islice(endless, load.num_prompts)))

    def _endless(self, stream: int) -> Iterator[BenchPrompt]:
        if self.lines:
            return itertools.cycle(self.lines)
        return _random_prompts(self.workload, stream)


def load_prompts(workload: Workload) -> Prompts:
    """Reads the file if the workload has one. Raises InvalidArgument that names file and line."""
    if workload.file is None:
        return Prompts(workload=workload)
    return Prompts(workload=workload, lines=tuple(_read_prompts(workload.file, workload.output_len)))


def arrival_offsets(rate: float, seed: int) -> Iterator[float]:
    """Yields without end the arrival times of a Poisson process of `rate` requests/s, in seconds after its start."""
    random = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += random.exponential(1 / rate)
        yield now


def _random_prompts(workload: Workload, stream: int) -> Iterator[BenchPrompt]:
    prefix = _ids(np.random.default_rng([workload.seed, _PREFIX]), workload.prefix_len, workload.vocab_size)
    random = np.random.default_rng([workload.seed, stream])
    while True:
        own = _ids(random, workload.input_len, workload.vocab_size)
        yield BenchPrompt(content=prefix + own, max_tokens=workload.output_len)


def _ids(random: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    ids: list[int] = random.integers(vocab_size, size=count).tolist()
    return ids


def _read_prompts(path: Path, default_max_tokens: int) -> list[BenchPrompt]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", "--file") from None
    prompts = [
        _parse_prompt(line, f"{path}:{i}", default_max_tokens) for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise InvalidArgument(f"{path} holds no prompt", "--file")
    return prompts


def _parse_prompt(line: str, place: str, default_max_tokens: int) -> BenchPrompt:
    try:
        parsed = json.loads(line)
    except ValueError:
        raise InvalidArgument(f"{place}: is not JSON", "--file") from None
    if not isinstance(parsed, dict):
        raise InvalidArgument(f'{place}: must be an object, as {{"prompt": "...", "max_tokens": 64}}', "--file")
    content, max_tokens = parsed.get("prompt"), parsed.get("max_tokens", default_max_tokens)
    is_ids = isinstance(content, list) and all(type(token) is int and token >= 0 for token in content)
    if not content or not (isinstance(content, str) or is_ids):
        raise InvalidArgument(f"{place}: prompt must be text or token ids, and not empty", "--file")
    if type(max_tokens) is not int or max_tokens < 1:
        raise InvalidArgument(f"{place}: max_tokens must be at least 1", "--file")
    return BenchPrompt(content=content, max_tokens=max_tokens)
