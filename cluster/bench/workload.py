"""Makes the prompts and arrival times of a benchmark from a seed."""

import itertools
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ..text_files import parse_lines, read_text
from .options import LoadOptions, Workload

_PREFIX, _WARMUP, _ROUNDS = range(3)  # streams of random numbers of one seed


class BenchPrompt(BaseModel):
    """Holds one request to send; also a line of a file of prompts."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: Annotated[str | list[NonNegativeInt], Field(min_length=1)]  # text or token ids
    max_tokens: PositiveInt = 0  # 0, in a line only: as the workload says


class Prompts:
    """Makes the prompts of a benchmark; the same seed gives the same prompts."""

    def __init__(self, workload: Workload) -> None:
        """Reads the file if the workload has one. Raises InvalidArgument that names file and line."""
        self._workload = workload
        self._lines: list[BenchPrompt] = []
        if (path := workload.file) is not None:
            self._lines = [
                each
                if each.max_tokens
                else BenchPrompt(prompt=each.prompt, max_tokens=workload.output_len)
                for each in parse_lines(read_text(path, "--file"), path, BenchPrompt)
            ]

    def warmup(self) -> Iterator[BenchPrompt]:
        """Yields prompts without end, other than those of the rounds unless they come from a file."""
        return self._endless(_WARMUP)

    def of_round(self, number: int, load: LoadOptions) -> Iterator[BenchPrompt]:
        """Returns the prompts of round `number`, from 0 up; each round has others unless they come
        from a file.

        If their number is known they are made before the round begins, so that this takes none of
        its time.
        """
        endless = self._endless(_ROUNDS + number)
        if load.num_prompts is None:
            return endless if load.seconds is not None else iter(self._lines)
        return iter(list(itertools.islice(endless, load.num_prompts)))

    def _endless(self, stream: int) -> Iterator[BenchPrompt]:
        if self._lines:
            return itertools.cycle(self._lines)
        return _random_prompts(self._workload, stream)


def arrival_offsets(rate: float, seed: int) -> Iterator[float]:
    """Yields without end the arrival times of a Poisson process of `rate` requests/s, in seconds
    after its start.
    """
    random = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += random.exponential(1 / rate)
        yield now


def _random_prompts(workload: Workload, stream: int) -> Iterator[BenchPrompt]:
    prefix = _ids(
        np.random.default_rng([workload.seed, _PREFIX]), workload.prefix_len, workload.vocab_size
    )
    random = np.random.default_rng([workload.seed, stream])
    while True:
        own = _ids(random, workload.input_len, workload.vocab_size)
        yield BenchPrompt(prompt=prefix + own, max_tokens=workload.output_len)


def _ids(random: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    ids: list[int] = random.integers(vocab_size, size=count).tolist()
    return ids
