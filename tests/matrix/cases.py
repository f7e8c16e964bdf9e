"""Names the factors of the fault matrix, and chooses cases in which each pair of their values
occurs.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher

from tandem.proto import inference_pb2
from tandem.tests.matrix.nodes import BLOCK_SIZE
from tandem.tests.watermarks import MESSAGE as WATERMARK

FAULTS: Final = ("kill", "stop", "cut", "drain", "full")
POINTS: Final = ("queued", "prefill", "pull", "token", "last")
SAMPLINGS: Final = (
    "greedy",
    "seed",
    "penalties",
    "grammar",
    "logprobs",
    "choices",
    "beam",
    "stop rules",
    "repetition",
)
LAYOUTS: Final = ("1+1", "2+2", "0+2", "tp 2", "int8")
OPTIONS: Final = (
    *("ngram", "tiers", "fp8", "window", "window tiers"),
    *("hybrid", "hybrid tp 2", "hybrid tiers"),
)
"""Layouts of 1+1 workers with one more feature each."""

PROMPT_LENGTH: Final = 42  # the KV of the last token but one begins a block: 42 + 22 = 4 * 16
NUM_TOKENS: Final = 24
assert (PROMPT_LENGTH + NUM_TOKENS - 2) % BLOCK_SIZE == 0

PROMPT: Final = tuple((7 * n) % 400 + 3 for n in range(PROMPT_LENGTH))
_GRAMMAR: Final = LLMatcher.grammar_from_regex("(red|green|blue)( [0-9]{3}){100}")
_SEED: Final = inference_pb2.SamplingParams(
    temperature=1, top_p=1, seed=11, typical_p=1, repetition_penalty=1
)
_PENALTIES: Final = inference_pb2.SamplingParams(
    temperature=1,
    top_p=1,
    seed=11,
    typical_p=1,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
)
_TWO_TOKENS: Final = inference_pb2.SamplingParams(
    temperature=1,
    top_p=1,
    seed=11,
    typical_p=1,
    repetition_penalty=1,
    logit_bias={5: 100.0, 6: 100.0},
)
"""Draws only two tokens, so that their n-grams repeat."""
_BEAM: Final = inference_pb2.BeamSearch(width=4, length_penalty=1.0, early_stopping=False)

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "seed": {"sampling": _SEED, "logprobs": 0},
    "penalties": {"sampling": _PENALTIES, "watermark": WATERMARK, "logprobs": 0},
    "grammar": {"sampling": _SEED, "grammar": _GRAMMAR, "logprobs": 0},
    "logprobs": {"sampling": _PENALTIES, "logprobs": 3, "prompt_logprobs": 1},
    "choices": {"sampling": _SEED, "num_choices": 4, "logprobs": 0},
    "beam": {"beam_search": _BEAM, "num_choices": 2},
    "stop rules": {"sampling": _SEED, "num_choices": 2, "logprobs": 0},
    "repetition": {"sampling": _TWO_TOKENS, "num_choices": 2, "logprobs": 0},
}
"""What each sampling asks for, beside the prompt and NUM_TOKENS. A grammar holds longer than these.
"""


RULED: Final = ("stop rules", "repetition")
"""The samplings that rules of the router end, see `stops_of`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    fault: str
    point: str
    sampling: str
    layout: str
    variant: int = 0  # of the fault, where there are several: what is cut, which rank is killed

    def __str__(self) -> str:
        return "-".join(
            (self.fault, self.point, self.sampling, self.layout, str(self.variant))
        ).replace(" ", "_")


def whole_product() -> list[Case]:
    """Returns every case, each in one variant; each layout has both variants of each fault."""
    product = itertools.product(FAULTS, POINTS, enumerate(SAMPLINGS), enumerate(LAYOUTS + OPTIONS))
    return [
        Case(fault, point, sampling, layout, variant=(number + other) % 2)
        for fault, point, (number, sampling), (other, layout) in product
    ]


def with_options() -> list[Case]:
    """Returns cases in which every fault, every point and most samplings meet every option."""
    chosen = []
    for number, option in enumerate(OPTIONS):
        for index, fault in enumerate(FAULTS):
            sampling = SAMPLINGS[(index + len(FAULTS) * number) % len(SAMPLINGS)]
            chosen.append(
                Case(fault, POINTS[(index + 2) % len(POINTS)], sampling, option, variant=index % 2)
            )
    return chosen


def pairwise() -> list[Case]:
    """Returns cases in which each pair of values of two factors occurs: greedily the one with the
    most new pairs.
    """
    candidates = list(itertools.product(FAULTS, POINTS, SAMPLINGS, LAYOUTS))
    left = {pair for values in candidates for pair in pairs_of(values)}
    chosen: list[Case] = []
    while left:
        best = max(candidates, key=lambda values: len(left & pairs_of(values)))
        left -= pairs_of(best)
        chosen.append(Case(*best, variant=len(chosen) % 2))
    return chosen


def pairs_of(values: tuple[str, ...]) -> frozenset[tuple[tuple[int, str], ...]]:
    """Returns the pairs of values that a case has."""
    return frozenset(itertools.combinations(enumerate(values), 2))
