"""Compares the frequencies of the Triton sampler's draws with the exact distribution.

`TRITON_INTERPRET=1 python -m tandem.tests.workers.model.sampling_frequencies --draws 2000000` takes
minutes without a GPU.
"""

import argparse
import math
import sys
from typing import Final

import pytest
import torch

from tandem.tests.workers.model.test_gumbel import logits_row, warped
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.model import kernels
from tandem.workers.model.kernels.triton import elementwise, sampling
from tandem.workers.model.sampling.gumbel import sample

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH: Final = 2**16
VOCAB_SIZE: Final = 16
LEVEL: Final = 5.0  # standard deviations of chi-square, about 1 in 1.7 million

KINDS: Final = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0.6, seed=2),
    SamplingParams(top_k=9, seed=3),
    SamplingParams(top_p=0.7, temperature=1.2, seed=4),
    SamplingParams(min_p=0.1, seed=2**64 - 1),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, seed=6),
)


def deviation(params: SamplingParams, num_draws: int) -> float:
    """Returns the deviation of chi-square from its mean, in standard deviations.

    Raises AssertionError if a token was drawn that the filters exclude.
    """
    logits = logits_row(VOCAB_SIZE, spread=1.0)
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for begin in range(0, num_draws, BATCH):
        positions = range(begin, min(begin + BATCH, num_draws))
        rows = logits.to(DEVICE).expand(len(positions), -1)
        tokens = sample(rows, [params] * len(positions), positions).cpu()
        counts += torch.bincount(tokens, minlength=VOCAB_SIZE)
    expected = warped(logits, params)[0].double().softmax(-1) * num_draws
    assert not counts[expected == 0].any()
    common = expected >= 5
    chi_square = ((counts - expected)[common].square() / expected[common]).sum().item()
    freedom = int(common.sum()) - 1
    assert freedom >= 3
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def deviations(num_draws: int) -> list[float]:
    """Returns the deviation of each of KINDS, sampled by the Triton kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "of", lambda tensor: elementwise)
        if DEVICE.type == "cpu":
            patch.setattr(sampling, "_TILE", 2**14)  # fewer programs to interpret
        return [deviation(params, num_draws) for params in KINDS]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=2_000_000)
    num_draws = parser.parse_args(arguments).draws
    found = deviations(num_draws)
    for params, each in zip(KINDS, found, strict=True):
        print(f"{num_draws} draws, {each:+.2f} standard deviations: {params}")
    return int(max(map(abs, found)) >= LEVEL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
