"""The C kernels against plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tandem.workers.engine.plan import KvLayout
from tandem.workers.model import kernels
from tandem.workers.model.attention import SequenceSpan, TorchAttention
from tandem.workers.model.config import RopeConfig
from tandem.workers.model.kv import PagedKv
from tandem.workers.model.layers import RmsNorm
from tandem.workers.model.rope import RotaryTable, rotate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def test_this_machine_has_them() -> None:
    """A C compiler is among what a developer's machine needs; without it nothing below would test anything."""
    assert kernels.usable(torch.zeros(1))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"), [(9, 3, 64), (8, 8, 64), (8, 1, 128), (6, 2, 48), (4, 2, 256)]
)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_equals_plain_torch(
    dtype: str, num_heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    torch.manual_seed(0)
    layout = KvLayout(num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, model="m")
    stores = [PagedKv(layout, num_blocks=128, block_size=8, device=torch.device("cpu")) for _ in range(2)]
    stores[0].data.normal_()
    stores[1].data.copy_(stores[0].data)
    order = torch.randperm(128).tolist()
    lengths = [1, 8, 9, 130, 257]  # the new token included; one past a tile of the kernel's keys
    spans = [
        SequenceSpan(blocks=[order.pop() for _ in range(-(-length // 8))], start=length - 1, num_tokens=1)
        for length in lengths[:-1]
    ]
    chunks = ((254, 3), (0, 150), (63, 70))  # start, tokens
    spans += [
        SequenceSpan(blocks=[order.pop() for _ in range(-(-(start + count) // 8))], start=start, num_tokens=count)
        for start, count in chunks
    ]
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, num_heads, head_dim).to(DTYPES[dtype])
    key, value = (torch.randn(tokens, kv_heads, head_dim).to(DTYPES[dtype]) for _ in range(2))
    results = []
    for native, kv in zip((True, False), stores, strict=True):
        step = TorchAttention(kv, [None, window], num_heads, native=native).plan(spans)
        results.append([step(layer, query, key, value).float() for layer in range(2)])
    assert torch.equal(stores[0].data, stores[1].data)
    for ours, reference in zip(*results, strict=True):
        assert (ours - reference).abs().max() <= TOLERANCE[DTYPES[dtype]]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_small_kernels_equal_plain_torch(dtype: str, rows: int) -> None:
    torch.manual_seed(0)
    kind, tolerance = DTYPES[dtype], TOLERANCE[DTYPES[dtype]]
    x, weight = torch.randn(rows, 576).to(kind), torch.randn(576).to(kind)
    plain = RmsNorm(weight, 1e-5)
    plain._native = False
    assert (kernels.rms_norm(x, weight, 1e-5) - plain(x)).abs().max() <= 4 * tolerance
    gate, up = x.chunk(2, -1)
    assert (kernels.silu_mul(x) - functional.silu(gate) * up).abs().max() <= 4 * tolerance
    cos, sin = RotaryTable(RopeConfig(), 64, dtype=kind, device=torch.device("cpu"))(torch.arange(rows) * 3)
    heads = x.view(rows, 9, 64)[:, 2:7]  # a view, as the decoder has it
    expected = heads.float() * cos.float() + heads.float().roll(32, -1) * sin.float()
    untouched = x.view(rows, 9, 64)[:, 7:].clone()
    assert (rotate(heads, cos, sin).float() - expected).abs().max() <= tolerance
    assert torch.equal(x.view(rows, 9, 64)[:, 7:], untouched)


def test_without_a_compiler_the_model_runs_in_plain_torch(tmp_path: Path) -> None:
    code = "import torch; from tandem.workers.model import kernels; print(kernels.usable(torch.zeros(1)))"
    environment = os.environ | {"CC": str(tmp_path / "none"), "TANDEM_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"
    assert "no C kernels" in done.stderr
