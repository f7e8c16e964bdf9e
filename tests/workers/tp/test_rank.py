"""Tests which ranks are refused before their model is read."""

import pytest
import torch

from tandem.tests.peers import IDENTITY
from tandem.workers.tp.rank import RankConfig, load_rank


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (None, "torch has no CUDA; install it from PyPI, without the index for CPUs"),
        ("13.0", "torch finds no GPU; check the driver and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_rank_without_its_gpu_tells_the_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = RankConfig(model="never read", identity=IDENTITY, device="cuda")
    with pytest.raises(ValueError, match=f"^device: cuda cannot be used: {reason}$"):
        load_rank(config)
