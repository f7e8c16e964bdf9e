"""The C kernels against plain torch."""

import os
import platform
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tandem.workers.engine.plan import SamplingParams
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.attention.backend import PLAIN, AttentionOptions, SequenceSpan
from tandem.workers.model.attention.torch_backend import TorchAttentionBackend
from tandem.workers.model.config import RopeConfig
from tandem.workers.model.kernels.c import build, cpu, elementwise
from tandem.workers.model.kv.store import PagedKv
from tandem.workers.model.layers.norm import RMSNorm
from tandem.workers.model.layers.rotary import CosSin, RotaryEmbedding, apply_rotary
from tandem.workers.model.quant.integer import BITS, restore_weight, round_weight
from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
from tandem.workers.model.sampling.gumbel import sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def test_this_machine_has_them() -> None:
    """A C compiler is among what a developer's machine needs; without it nothing below would test
    anything.
    """
    assert cpu.usable(torch.zeros(1))


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"),
    [
        *((9, 3, 64), (8, 8, 64), (8, 1, 128), (6, 2, 48), (4, 2, 256)),
        # More query heads of a KV head than rows of an item; wide heads have fewer rows.
        *((300, 1, 32), (65, 1, 260), (6, 2, 512)),
    ],
)
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, PLAIN),
        (20, PLAIN),
        (20, AttentionOptions(scale=0.3, soft_cap=2.0)),
        (None, AttentionOptions(sinks=torch.linspace(-2, 4, 300))),
    ],
)
def test_attention_equals_plain_torch(
    dtype: str,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    options: AttentionOptions,
) -> None:
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks[:num_heads])
    torch.manual_seed(0)
    layout = KvLayout.uniform(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        model="m",
    )
    stores = [
        PagedKv(layout, num_blocks=128, block_size=8, device=torch.device("cpu")) for _ in range(2)
    ]
    stores[0].data.normal_()
    stores[1].data.copy_(stores[0].data)
    order = torch.randperm(128).tolist()
    lengths = [1, 8, 9, 130, 257]  # the new token included; one past a tile of the kernel's keys
    spans = [
        SequenceSpan(
            tables=[[order.pop() for _ in range(-(-length // 8))]], start=length - 1, num_tokens=1
        )
        for length in lengths[:-1]
    ]
    chunks = ((254, 3), (0, 150), (63, 70))  # start, tokens
    spans += [
        SequenceSpan(
            tables=[[order.pop() for _ in range(-(-(start + count) // 8))]],
            start=start,
            num_tokens=count,
        )
        for start, count in chunks
    ]
    tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(tokens, num_heads, head_dim).to(DTYPES[dtype])
    key, value = (torch.randn(tokens, kv_heads, head_dim).to(DTYPES[dtype]) for _ in range(2))
    results = []
    for native, kv in zip((True, False), stores, strict=True):
        layers = [
            LayerGeometry(
                num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, window=each
            )
            for each in (None, window)
        ]
        step = TorchAttentionBackend(kv, layers, native=native).plan(spans)
        results.append([step(layer, query, key, value, options).float() for layer in range(2)])
    assert torch.equal(stores[0].data, stores[1].data)
    for ours, reference in zip(*results, strict=True):
        # Half as much again, because plain torch also rounds scores and weights to bfloat16.
        assert (ours - reference).abs().max() <= 1.5 * TOLERANCE[DTYPES[dtype]]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_small_kernels_equal_plain_torch(dtype: str, rows: int) -> None:
    torch.manual_seed(0)
    kind, tolerance = DTYPES[dtype], TOLERANCE[DTYPES[dtype]]
    x, weight = torch.randn(rows, 576).to(kind), torch.randn(576).to(kind)
    plain = RMSNorm("norm", 576, 1e-5, kind)
    plain.weight.data = weight
    plain.process_after_load()
    plain._kernels = None
    assert (cpu.rms_norm(x, weight, 1e-5) - plain(x)).abs().max() <= 4 * tolerance
    gate, up = x.chunk(2, -1)
    assert (cpu.silu_mul(x) - functional.silu(gate) * up).abs().max() <= 4 * tolerance
    assert (
        cpu.gelu_mul(x) - functional.gelu(gate, approximate="tanh") * up
    ).abs().max() <= 4 * tolerance
    residual = torch.randn(rows, 576).to(kind)
    plain._offset = 1.0
    assert (
        cpu.rms_norm(x, weight, 1e-5, 1.0, residual) - plain(x, residual)
    ).abs().max() <= 8 * tolerance
    layer_norm = functional.layer_norm(x.float(), (576,), weight.float())
    assert (cpu.layer_norm(x, weight, 1e-5).float() - layer_norm).abs().max() <= 4 * tolerance
    assert (
        cpu.scale(x, 0.3, residual).float() - (0.3 * x.float() + residual.float())
    ).abs().max() <= 2 * tolerance
    assert (cpu.scale(x, 3.0).float() - 3.0 * x.float()).abs().max() <= 4 * tolerance
    assert (cpu.soft_cap(x, 2.0).float() - 2 * torch.tanh(x.float() / 2)).abs().max() <= tolerance
    cos, sin = RotaryEmbedding(
        RopeConfig(), 64, max_positions=600, dtype=kind, device=torch.device("cpu")
    )(torch.arange(rows) * 3)
    heads = x.view(rows, 9, 64)[:, 2:7]  # a view, as the decoder has it
    expected = heads.float() * cos.float() + heads.float().roll(32, -1) * sin.float()
    untouched = x.view(rows, 9, 64)[:, 7:].clone()
    assert (apply_rotary(heads, (cos, sin)).float() - expected).abs().max() <= tolerance
    assert torch.equal(x.view(rows, 9, 64)[:, 7:], untouched)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_table_of_positions_is_computed_in_parts(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals angles that are computed at once, which would take several times its bytes."""
    config = RopeConfig(theta=1e6, attention_factor=1.1)

    def embedding() -> RotaryEmbedding:
        return RotaryEmbedding(
            config, 64, max_positions=10_001, dtype=DTYPES[dtype], device=torch.device("cpu")
        )

    sizes: list[int] = []
    compute = RotaryEmbedding._compute

    def counting(self: RotaryEmbedding, positions: torch.Tensor) -> CosSin:
        sizes.append(len(positions))
        return compute(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "_compute", counting)
    positions = torch.arange(10_001)
    in_parts = embedding()(positions)
    assert max(sizes) < sum(sizes) == 10_001
    monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    at_once = embedding()(positions)
    assert sizes[-1] == 10_001
    assert all(torch.equal(*pair) for pair in zip(in_parts, at_once, strict=True))


@pytest.fixture(params=["this processor's form", "widened"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How weights are multiplied: also as on a processor without dot products of few bits."""
    if request.param == "widened":
        monkeypatch.setattr(cpu, "linear_form", lambda kind="": cpu.WIDENED)
    elif not cpu.can_multiply(torch.zeros(32, 32).bfloat16()):
        pytest.skip("AMX")


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 40, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (576, 1536), (50, 34), (1, 2)])
def test_linear_equals_plain_torch(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16()
    x = torch.randn(rows, 3 * inputs).bfloat16()[
        :, inputs : 2 * inputs
    ]  # a view, as the decoder may have it
    residual = torch.randn(rows, outputs).bfloat16()
    plain = functional.linear(x.float(), weight.float())
    packed = cpu.pack_linear(weight)
    close(cpu.linear(x, packed, outputs), plain)
    y = cpu.linear(x, packed, outputs, bias, residual)
    close(y, plain + bias.float() + residual.float())
    for row in (0, rows - 1):  # is the same bits alone
        assert torch.equal(
            cpu.linear(x[row:][:1], packed, outputs, bias, residual[row:][:1])[0], y[row]
        )


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(5, 64, 48), (3, 32, 128)])
def test_each_head_has_a_weight_of_its_own(
    rows: int, heads: int, outputs: int, inputs: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(heads, outputs, inputs).bfloat16()
    # The heads of a query before it is split: rows and heads have strides of their own.
    x = torch.randn(heads, rows, inputs + 16).bfloat16().transpose(0, 1)[..., :inputs]
    assert cpu.can_multiply_heads(weight)
    found = cpu.linear_by_head(x, cpu.pack_linear(weight.flatten(0, 1)))
    expected = torch.einsum("nhi,hoi->nho", x.float(), weight.float())
    assert (found.float() - expected).norm() <= 4e-3 * expected.norm()
    alone = cpu.linear_by_head(x[-1:], cpu.pack_linear(weight.flatten(0, 1)))
    assert torch.equal(alone, found[-1:])


@pytest.mark.parametrize("bits", BITS.values())
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(96, 64, 64), (70, 192, 8)])
def test_integers_are_widened(
    bits: int, outputs: int, inputs: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a processor without their dot product: inputs are not rounded."""
    monkeypatch.setattr(cpu, "linear_form", lambda kind="": cpu.WIDENED)
    torch.manual_seed(0)
    numbers, scales, _ = round_weight(torch.randn(outputs, inputs), bits, group_size)
    for zeros in (None, torch.randint(0, 256, scales.shape, dtype=torch.uint8)):
        packed, weight = (
            cpu.pack_linear_int(numbers, scales, zeros, bits),
            restore_weight(numbers, scales, zeros, bits),
        )
        for rows in (1, 2, 13):
            x = torch.randn(rows, inputs).bfloat16()
            y = cpu.linear_int(x, packed, outputs)
            close(y, functional.linear(x.float(), weight))
            assert torch.equal(cpu.linear_int(x[:1], packed, outputs)[0], y[0])


def test_a_soft_cap_lets_nan_pass() -> None:
    """As what fails a sequence whose logits are not finite."""
    assert cpu.soft_cap(torch.full((1, 40), torch.nan), 30.0).isnan().all()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows", [1, 30])
def test_gated_linear_equals_plain_torch(rows: int) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 48, 64).bfloat16()
    x = (
        torch.randn(rows, 64).bfloat16() * 8
    )  # gates of up to 200: where e^x leaves the range of float32
    packed = cpu.pack_linear(cpu.alternate(gate, up))
    expected = functional.silu(functional.linear(x.float(), gate.float())) * functional.linear(
        x.float(), up.float()
    )
    close(cpu.linear(x, packed, 96, activation="silu"), expected)
    gelu = functional.gelu(functional.linear(x.float(), gate.float()), approximate="tanh")
    expected = gelu * functional.linear(x.float(), up.float())
    close(cpu.linear(x, packed, 96, activation="gelu_tanh"), expected)
    added = torch.randn(2, rows, 48).bfloat16() * 8
    both = cpu.alternate(
        *(each.T for each in added)
    ).T.contiguous()  # of gates and ups in turn, as the weights are
    sums = [
        functional.linear(x.float(), each.float()) + more.float()
        for each, more in zip((gate, up), added, strict=True)
    ]
    close(
        cpu.linear(x, packed, 96, residual=both, activation="silu"),
        functional.silu(sums[0]) * sums[1],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_without_our_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's packed form in bfloat16, plain torch else: on processors with AMX, and without a
    compiler.
    """
    monkeypatch.setattr(cpu, "can_multiply", lambda weight: False)
    torch.manual_seed(0)
    weight, bias, x, residual = (
        torch.randn(*shape).to(dtype) for shape in ((96, 64), (96,), (5, 64), (5, 96))
    )
    product = functional.linear(x.float(), weight.float(), bias.float())
    method = UnquantizedLinearMethod.from_tensors(weight, bias)
    close(method.apply(x), product)
    close(method.apply(x, residual), product + residual.float(), roundings=2)


def close(ours: torch.Tensor, reference: torch.Tensor, roundings: int = 1) -> None:
    """Equal but for roundings to bfloat16 and the order of the sum."""
    assert ours.shape == reference.shape
    assert (ours.float() - reference).abs().max() <= roundings * 2**-8 * reference.abs().max()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("vocab_size", [7, 1024, 3000])
def test_sampling_equals_plain_torch(
    dtype: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, random and filtered rows, the last token among those that win. Near ties may fall
    either way.
    """
    torch.manual_seed(0)
    logits = (torch.randn(600, vocab_size) * 3).to(DTYPES[dtype])
    logits[0, -1] = 50
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.3, seed=2**63),
        SamplingParams(temperature=1.0, top_p=0.9, typical_p=0.9, seed=9),
    ]
    params = [kinds[row % 4] for row in range(600)]
    ours = sample(logits, params, range(600))
    monkeypatch.setattr(cpu, "usable", lambda tensor: False)
    reference = sample(logits, params, range(600))
    assert ours[0] == vocab_size - 1
    assert torch.equal(ours[::4], reference[::4])
    assert torch.equal(ours[3::4], reference[3::4])
    assert (ours != reference).sum() <= 1


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0, 40.0])
def test_filtered_sampling_equals_plain_torch(
    dtype: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each filter and all together, where few or most tokens are kept; in bfloat16 most scores have
    ties.
    """
    torch.manual_seed(0)
    kinds = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.2, 1.0)
        for top_k in (0, 1, 50, 2_000, 10_000)
        for top_p in (1.0, 0.05, 0.9, 0.999)
        for min_p in (0.0, 0.05, 1.0)
    ]
    logits = (torch.randn(len(kinds), 3000) * spread).to(DTYPES[dtype])
    logits[::7, 100:2900] = -torch.inf
    tokens: dict[bool, list[torch.Tensor]] = {}
    for native in (True, False):
        monkeypatch.setattr(cpu, "usable", lambda tensor, native=native: native)
        params = [[replace(kind, seed=seed) for kind in kinds] for seed in range(3)]
        tokens[native] = [sample(logits, each, range(len(kinds))) for each in params]
    ours, reference = torch.stack(tokens[True]), torch.stack(tokens[False])  # [seeds, kinds]
    # What lies on an edge of a filter by less than a rounding may be kept by one and not by the
    # other.
    assert (ours != reference).float().mean() < 0.002


def test_filters_keep_ties_and_pass_what_is_not_finite() -> None:
    logits = torch.full((6, 5000), -torch.inf)
    logits[:, 4000:4004] = 1.0
    logits[4, 7], logits[5, 7] = torch.nan, torch.inf
    kinds = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1, top_p=0.1, min_p=0.9),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.3),
    ]
    drawn = [
        sample(logits, [replace(kind, seed=seed) for kind in kinds], [9] * 6) for seed in range(64)
    ]
    assert [set(column.tolist()) for column in torch.stack(drawn).unbind(1)] == [
        {4000, 4001, 4002, 4003}
    ] * 4 + [{-1}] * 2


def test_equal_logits_are_drawn_equally_often() -> None:
    """Four million variates reach the ends of the noise, where a rounded logarithm would favour a
    few tokens.
    """
    logits = torch.zeros(64, 64)
    counts = torch.zeros(64)
    for first in range(0, 65_536, 64):
        tokens = sample(logits, [SamplingParams(seed=1)] * 64, range(first, first + 64))
        counts += torch.bincount(tokens, minlength=64)
    chi_square = ((counts - 1024).square() / 1024).sum().item()
    assert abs(chi_square - 63) < 5 * (2 * 63) ** 0.5


def test_a_team_of_all_cores_gets_one_each() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core")
    before = torch.get_num_threads()
    seen: list[list[set[int]]] = []

    def run() -> None:
        others = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        cpu.silu_mul(torch.ones(4096, 64))
        helpers = {int(task.name) for task in Path("/proc/self/task").iterdir()} - others
        seen.append([os.sched_getaffinity(0), *map(os.sched_getaffinity, sorted(helpers))])

    def run_both() -> None:
        torch.set_num_threads(len(cores) - 1)
        cpu.bind_threads()
        run()
        torch.set_num_threads(len(cores))
        cpu.bind_threads()
        run()

    thread = threading.Thread(target=run_both)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert all(each == cores for each in seen[0]), "fewer threads than cores stay free"
    assert seen[1] == [{core} for core in sorted(cores)]
    assert os.sched_getaffinity(0) == cores, "the threads that compute nothing stay free"


def test_more_cores_than_a_team_may_have_threads_stay_free() -> None:
    """A list of their numbers would overwrite what the team needs to run."""
    program = """if True:
        import ctypes, os, torch
        from tandem.workers.model.kernels.c import build, cpu
        torch.set_num_threads(2)
        before = os.sched_getaffinity(0)
        cores = torch.ones(2000, dtype=torch.int64)
        address, count = ctypes.c_void_p(cores.data_ptr()), ctypes.c_int64(len(cores))
        build.library().bind_threads(address, count)
        x = torch.ones(4096, 64)
        sums = {float(cpu.silu_mul(x).sum()) for _ in range(20)}
        print(len(sums), os.sched_getaffinity(0) == before)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr


def test_denormals_stay_what_they_are() -> None:
    code = (
        "from tandem.workers.model.kernels.c import build; build.library(); print(5e-324 * 1.0, "
        "1e-310 / 2 > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "5e-324 True\n"


def test_they_compile_without_a_warning() -> None:
    """For each kind of processor, whatever this one is.

    Only here: a user's newer compiler that warns of something new is still to build them.
    """
    folder = Path(cpu.__file__).parent
    flags = [*build._FLAGS, f"-I{folder}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    kinds: tuple[str, ...] = ("native",)
    if platform.machine() == "x86_64":
        kinds = ("x86-64-v2", "x86-64-v3", "cooperlake", "sapphirerapids")
    for march in kinds:
        for source in folder.rglob("*.c"):
            command = ["cc", *flags, f"-march={march}", str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_model_runs_in_plain_torch(tmp_path: Path) -> None:
    code = (
        "import torch; from tandem.workers.model.kernels.c import cpu; "
        "print(cpu.usable(torch.zeros(1)))"
    )
    environment = os.environ | {"CC": str(tmp_path / "none"), "TANDEM_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"
    assert "no C kernels" in done.stderr


@pytest.mark.skipif(not cpu.can_multiply(torch.zeros(64, 64).bfloat16()), reason="no kernel: AMX")
def test_no_rows_are_computed_by_several_threads() -> None:
    """A chunk of a prompt that is not its last has no row whose logits are wanted."""
    program = """if True:
        import torch
        from tandem.workers.model.quant.unquantized import UnquantizedLinearMethod
        torch.set_num_threads(2)
        linear = UnquantizedLinearMethod.from_tensors(torch.zeros(256, 64).bfloat16())
        print(tuple(linear.apply(torch.zeros(0, 64).bfloat16()).shape))
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "(0, 256)\n")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", ["relu", "silu", "gelu", "gelu_tanh", "tanh"])
def test_an_activation_passes_a_nan_on(operation: str, dtype: torch.dtype) -> None:
    """A worker finds broken numbers in the logits, so no layer may hide them."""
    x = torch.tensor([[-1.0, float("nan"), 2.0] * 16], dtype=dtype)
    result = elementwise.compute(operation, x)
    assert torch.equal(result.isnan(), x.isnan())
