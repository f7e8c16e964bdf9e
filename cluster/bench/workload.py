"""Generates the prompts and arrival times of a benchmark from a seed."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from ..text_files import parse_lines, read_text
from ..traces.prompts import describe_trace, prompt_ids
from ..traces.read import read_trace
from .options import LoadOptions, Workload

# Streams of random numbers of one seed; each round has another stream from _ROUNDS on.
_PREFIX: Final = 0
_WARMUP: Final = 1
_ROUNDS: Final = 2


class BenchPrompt(BaseModel):
    """Holds one request to send; also a line of a file of prompts."""

    model_config = ConfigDict(frozen=True, strict=True)

    prompt: Annotated[str | list[NonNegativeInt], Field(min_length=1)]  # text or token ids
    max_tokens: PositiveInt = 0  # 0, only in a line of a file: the workload's number


class Prompts:
    """Generates the prompts of a benchmark; the same seed gives the same prompts."""

    def __init__(self, workload: Workload) -> None:
        """Reads the workload's file or trace. Raises InvalidArgument that names file and line."""
        self._workload = workload
        self._trace = read_trace(workload.trace, workload.trace_scale) if workload.trace else []
        self._lines: list[BenchPrompt] = []
        if (path := workload.file) is not None:
            self._lines = [
                each
                if each.max_tokens
                else BenchPrompt(prompt=each.prompt, max_tokens=workload.output_len)
                for each in parse_lines(read_text(path, "--file"), path, BenchPrompt)
            ]

    @property
    def description(self) -> str:
        """Returns one line about the trace; empty for other workloads."""
        return describe_trace(self._trace) if self._trace else ""

    def warmup(self) -> Iterator[BenchPrompt]:
        """Yields prompts without end; only prompts of a file occur also in the rounds."""
        return self._endless(_WARMUP)

    def of_round(self, number: int, load: LoadOptions) -> Iterator[BenchPrompt]:
        """Returns the prompts of round `number`, from 0; random ones differ in each round.

        If their number is known, they are generated before the round begins and take none of its
        time. Those of a trace, which would take much memory, are generated one before its turn.
        """
        if self._trace:
            return itertools.islice(self._replayed(_ROUNDS + number), load.num_prompts)
        endless = self._endless(_ROUNDS + number)
        if load.num_prompts is None:
            return endless if load.seconds is not None else iter(self._lines)
        return iter(list(itertools.islice(endless, load.num_prompts)))

    def arrivals(self, load: LoadOptions, seed: int) -> Iterator[float] | None:
        """Returns the times of an open loop, in seconds after its start; None for a closed loop."""
        if self._trace:
            return (request.time for request in self._trace)
        return None if load.rate is None else arrival_offsets(load.rate, seed)

    def _replayed(self, stream: int) -> Iterator[BenchPrompt]:
        workload = self._workload
        for index, request in enumerate(self._trace):
            own = () if request.block_hashes else (index,)
            ids = prompt_ids(request, workload.vocab_size, (workload.seed, stream, *own))
            yield BenchPrompt(prompt=ids, max_tokens=request.output_length)

    def _endless(self, stream: int) -> Iterator[BenchPrompt]:
        if self._lines:
            return itertools.cycle(self._lines)
        return _random_prompts(self._workload, stream)


def arrival_offsets(rate: float, seed: int) -> Iterator[float]:
    """Yields without end the arrival times of a Poisson process of `rate` requests/s.

    In seconds after its start.
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
