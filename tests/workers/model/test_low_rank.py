"""The kernels of low-rank terms: against float32, by rows of any mixture of pairs."""

import ctypes
import platform
import subprocess
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies

from tandem.workers.model.kernels.c import build, calls
from tandem.workers.model.kernels.c.low_rank import (
    PANEL,
    LowRankPairs,
    LowRankRows,
    PairRows,
    add_low_rank,
    can_multiply,
)

NUM_LAYERS = 3
LAYER = 1
RANKS = (16, 48, 80)
FILLER = torch.tensor([0x8000], dtype=torch.uint16).view(torch.bfloat16)  # -0

Factors = tuple[torch.Tensor, torch.Tensor]

pytestmark = pytest.mark.skipif(
    not can_multiply(torch.bfloat16, 32), reason="no kernels: no compiler"
)


@pytest.fixture(scope="module", params=["native", "portable"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """This processor's code, and the code of processors without a dot product of bfloat16."""
    if request.param == "native":
        return ""
    if platform.machine() != "x86_64":
        pytest.skip("this processor's code is the portable code")
    built = tmp_path_factory.mktemp("kernels") / "low_rank.so"
    flags = [each for each in build._FLAGS if not each.startswith("-march")]
    source = build._FOLDER / "linear" / "low_rank.c"
    compiled = built.with_suffix(".o")
    command = ["cc", *flags, "-march=x86-64-v3", f"-I{build._FOLDER}", "-c", str(source)]
    subprocess.run([*command, "-o", str(compiled)], check=True)
    linking = ["cc", *build._LINK_FLAGS, str(compiled), "-lm"]
    subprocess.run([*linking, "-o", str(built)], check=True)
    return str(built)


@pytest.fixture(autouse=True)
def use(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        return
    library = ctypes.CDLL(kernels)
    own = build.address

    def address(name: str, dtype: torch.dtype | None = None) -> int:
        if not name.startswith("low_rank"):
            return own(name, dtype)
        found = ctypes.cast(getattr(library, f"{name}_bf16"), ctypes.c_void_p).value
        assert found
        return found

    monkeypatch.setattr(calls, "address", address)


def made(inputs: int, outputs: int) -> list[tuple[Factors, LowRankPairs]]:
    """Pairs of all ranks for one of the layers, and their factors."""
    found = []
    for rank in RANKS:
        generator = torch.Generator().manual_seed(rank)
        down = torch.randn(rank, inputs, generator=generator).bfloat16()
        up = torch.randn(outputs, rank, generator=generator).bfloat16()
        pairs = LowRankPairs(NUM_LAYERS)
        pairs.add(LAYER, down, up)
        found.append(((down, up), pairs))
    return found


def rows_of(runs: Sequence[PairRows]) -> LowRankRows:
    rows = LowRankRows()
    rows.fill(runs)
    return rows


def compute(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    outputs: int,
    runs: Sequence[PairRows],
    layer: int = LAYER,
) -> torch.Tensor:
    width = -(-max(RANKS) // PANEL) * PANEL
    table = rows_of(runs)
    return add_low_rank(x, residual, outputs, layer=layer, rows_of=table, width=width)


def expected_row(
    x: torch.Tensor, residual: torch.Tensor | None, outputs: int, factors: Factors | None
) -> torch.Tensor:
    """The float32 result of a row, x [inputs], with a residual [1, outputs]; x A^T is rounded."""
    start = torch.zeros(outputs) if residual is None else residual[0].float()
    if factors is None:
        return start
    down, up = factors
    return start + up.float() @ (down.float() @ x.float()).bfloat16().float()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@settings(deadline=None, max_examples=40)
@given(
    counts=strategies.lists(
        strategies.tuples(strategies.integers(1, 50), strategies.integers(0, len(RANKS))),
        min_size=1,
        max_size=6,
    ),
    inputs=strategies.sampled_from([32, 66, 256]),
    outputs=strategies.sampled_from([16, 64, 300, 520]),
    has_residual=strategies.booleans(),
)
def test_each_row_has_the_term_of_its_pair(
    counts: list[tuple[int, int]], inputs: int, outputs: int, has_residual: bool
) -> None:
    """And the same bits alone as beside other rows, which have other pairs or none."""
    generator = torch.Generator().manual_seed(inputs + outputs)
    num_rows = sum(count for count, _ in counts)
    # Rows of x may be apart.
    x = torch.randn(num_rows, inputs + 8, generator=generator).bfloat16()[:, :inputs]
    residual = torch.randn(num_rows, outputs, generator=generator).bfloat16()
    choices: list[tuple[Factors | None, LowRankPairs | None]] = [
        (None, None),
        *made(inputs, outputs),
    ]
    runs: list[PairRows] = []
    chosen: list[tuple[Factors | None, LowRankPairs | None]] = []
    for count, choice in counts:
        runs.append((len(chosen), count, choices[choice][1]))
        chosen += [choices[choice]] * count
    found = compute(x, residual if has_residual else None, outputs, runs)
    for row, (factors, pairs) in enumerate(chosen):
        own = residual[row : row + 1] if has_residual else None
        expected = expected_row(x[row], own, outputs, factors)
        scale = max(float(expected.abs().max()), 1.0)
        assert (found[row].float() - expected).abs().max() <= 2**-7 * scale
        alone = compute(x[row : row + 1], own, outputs, [(0, 1, pairs)])
        assert torch.equal(bits(alone[0]), bits(found[row]))
        if factors is None:
            filler = FILLER.expand(outputs) if own is None else own[0]
            assert torch.equal(bits(found[row]), bits(filler))


@pytest.mark.parametrize("has_residual", [True, False])
def test_a_layer_without_pairs_changes_nothing(has_residual: bool) -> None:
    (_, pairs), *_ = made(64, 96)
    x = torch.randn(5, 64).bfloat16()
    residual = torch.randn(5, 96).bfloat16() if has_residual else None
    found = compute(x, residual, 96, [(0, 5, pairs)], layer=LAYER + 1)
    expected = FILLER.expand(5, 96) if residual is None else residual
    assert torch.equal(bits(found), bits(expected))


def test_the_filler_changes_no_number() -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].float()
    assert torch.equal((numbers + FILLER.float()).view(torch.int32), numbers.view(torch.int32))


@given(counts=strategies.lists(strategies.integers(1, 100), max_size=8))
def test_segments_cover_the_rows_and_are_short(counts: list[int]) -> None:
    pairs = LowRankPairs(NUM_LAYERS)
    runs: list[PairRows] = []
    for index, count in enumerate(counts):
        runs.append((sum(counts[:index]), count, pairs if index % 2 else None))
    table, _ = rows_of(runs)._held
    num_segments, *numbers = table
    assert len(numbers) == 3 * num_segments
    rows: list[tuple[int, int]] = []
    for first, count, address in zip(*(numbers[at::3] for at in range(3)), strict=True):
        assert 1 <= count <= 22
        rows += [(row, address) for row in range(first, first + count)]
    addresses = [pairs.address if each else 0 for _, count, each in runs for _ in range(count)]
    assert rows == list(enumerate(addresses))
