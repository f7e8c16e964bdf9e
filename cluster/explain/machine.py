"""Measures the limits of this machine for a model."""

import torch

from ...workers.model.config import ModelConfig
from ...workers.model.costs.measure import measure_floors
from ...workers.model.costs.roofline import Roofline
from ...workers.model.device import DTYPES

_MAX_ROWS = 1024
"""Rows of the measured products at most: the rate does not grow with more."""


def measure_machine(
    config: ModelConfig, dtype: str, prompt_tokens: int, device: str = "cpu"
) -> Roofline:
    """Measures bandwidth and products of this machine's device, in about two seconds.

    The products have the shapes of the model's first layer and as many rows as the prompt tokens.
    """
    rows = min(max(prompt_tokens, 1), _MAX_ROWS)
    return measure_floors(config, DTYPES[dtype], torch.device(device), rows).roofline
