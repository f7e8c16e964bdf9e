"""The size of the KV cache: sums and order with a stand-in for a GPU, and steps on a fake GPU."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.tests.peers import IDENTITY
from tandem.tests.tiny import make_tiny_model
from tandem.tests.workers.model.fake_cuda import Watch, fake_cuda, real
from tandem.tests.workers.model.test_fake_cuda import config_of, record
from tandem.workers.kv_cache.layout import KvLayout
from tandem.workers.model import graphs
from tandem.workers.model.footprint import CacheBytes, kv_layout
from tandem.workers.model.loader import LoadedModel, build_model, load_weights
from tandem.workers.model.runner import ModelRunner
from tandem.workers.model.warmup import StepLimits
from tandem.workers.tp import memory
from tandem.workers.tp.memory import CacheSize, gpu_blocks, host_counts, measure
from tandem.workers.tp.rank import RankConfig, load_rank

GIB = 2**30
LIMITS = StepLimits(num_tokens=2000, num_rows=100)
BLOCK = 2 * 2**20


def cache_size(**values: Any) -> CacheSize:
    fields: dict[str, Any] = {
        "bytes": CacheBytes(block=BLOCK),
        "block_size": 16,
        "cache_bytes": None,
        "share": 1.0,
        "utilization": 0.9,
        "limits": LIMITS,
    }
    return CacheSize(**fields | values)


class StandIn:
    """A GPU of 80 GiB whose allocator keeps what was used, until it is released or a capture
    begins.
    """

    def __init__(self, *, weights: float = 16, graphs: float = 0.5, others: float = 1) -> None:
        self.weights = int(weights * GIB)
        self.graphs = int(graphs * GIB)
        self.others = int(others * GIB)
        self.events: list[object] = []
        self.runners: weakref.WeakSet[StandInRunner] = weakref.WeakSet()
        self.cached = 3 * GIB  # left by loading

    def build(self, num_blocks: int) -> list[Any]:
        self.events.append(num_blocks)
        return [StandInRunner(self, num_blocks)]

    def reserved(self) -> int:
        return self.weights + self.cached + sum(each.held for each in self.runners)

    def free_and_total(self) -> tuple[int, int]:
        return 80 * GIB - self.others - self.reserved(), 80 * GIB

    def release(self) -> None:
        self.events.append("release")
        self.cached = 0


class StandInRunner:
    scratch_bytes_per_block = BLOCK // 64

    def __init__(self, gpu: StandIn, num_blocks: int) -> None:
        gpu.runners.add(self)
        self.gpu = gpu
        self.held = num_blocks * BLOCK

    def run_largest_steps(self, limits: StepLimits) -> None:
        self.gpu.events.append(limits)
        self.gpu.cached += 2 * GIB

    def capture_decodes(self, max_sequences: int) -> None:
        self.gpu.events.append(("capture", max_sequences))
        self.gpu.cached = 0
        self.held += self.gpu.graphs


def test_the_cache_gets_what_the_measured_parts_leave() -> None:
    gpu = StandIn()
    left = 0.9 * 80 - 16 - 2 - 0.5 - 1
    number = gpu_blocks(cache_size(), gpu.build, gpu, "cuda", None)
    assert number == int(left * GIB) // (BLOCK + BLOCK // 64)
    steps = [LIMITS, "release", ("capture", 100)]
    assert gpu.events == ["release", 125, *steps, "release"]
    assert not gpu.runners  # their memory has been returned


def test_the_measured_parts() -> None:
    gpu = StandIn()
    use, scratch = measure(cache_size(), gpu.build, gpu, None)
    parts = (use.weights, use.activations, use.graphs, use.rest)
    assert parts == (16 * GIB, 2 * GIB, GIB // 2, GIB)
    assert (use.total, scratch) == (sum(parts), BLOCK // 64)


def test_two_ranks_share_a_gpu() -> None:
    """Each has its share; what the other holds is neither rest nor free."""
    half = cache_size(share=0.5)
    first, second = StandIn(weights=8, others=0.5), StandIn(weights=8, others=0.5 + 36)
    numbers = [gpu_blocks(half, gpu.build, gpu, "cuda", None) for gpu in (first, second)]
    assert numbers[0] == int((0.9 * 40 - 8 - 2 - 0.5 - 0.5) * GIB) // (BLOCK + BLOCK // 64)
    assert numbers[1] == int((0.9 * 40 - 8 - 2 - 0.5 - 1) * GIB) // (BLOCK + BLOCK // 64)
    # Another program has most of the GPU.
    full = StandIn(weights=8, others=60)
    assert gpu_blocks(half, full.build, full, "cuda", None) == int(9.5 * GIB) // (
        BLOCK + BLOCK // 64
    )


@pytest.mark.parametrize(
    ("gpu", "parts"),
    [
        (StandIn(weights=70), "70.00 GiB of weights, 2.00 GiB of activations, 0.50 GiB of CUDA"),
        (StandIn(graphs=54), "54.00 GiB of CUDA graphs and 1.00 GiB of the rest"),
        (StandIn(others=55), "55.00 GiB of the rest"),
    ],
)
def test_a_gpu_without_room_is_refused_with_the_parts(gpu: StandIn, parts: str) -> None:
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization: no memory is left") as raised:
        gpu_blocks(cache_size(), gpu.build, gpu, "cuda", None)
    assert parts in str(raised.value)
    assert "of the 72.00 GiB that a rank may use" in str(raised.value)
    for remedy in ("raise gpu_memory_utilization or num_gpus", "max_sequences", "(tp)"):
        assert remedy in str(raised.value)


def test_a_size_that_is_set_is_checked_against_the_same_sum() -> None:
    gpu = StandIn()
    fits = cache_size(cache_bytes=50 * GIB)
    assert gpu_blocks(fits, gpu.build, gpu, "cuda", None) == 50 * GIB // BLOCK
    too_large = cache_size(cache_bytes=52 * GIB)
    with pytest.raises(
        ValueError, match=r"^kv_cache_gb: must be at most 51\.69, got 52\.00: of .* lower it"
    ):
        gpu_blocks(too_large, gpu.build, gpu, "cuda", None)


class Ranks:
    """A group whose other rank has measured `numbers`; records what waits for the other rank."""

    rank = 0
    size = 1  # as a model is split that is loaded here

    def __init__(self, numbers: Sequence[int], events: list[object] | None = None) -> None:
        self.numbers = torch.tensor(numbers)
        self.events = [] if events is None else events

    def connect(self) -> None: ...

    def meet(self, stage: str) -> None:
        self.events.append(stage)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.events.append("collective")
        return [x, self.numbers]


def test_all_ranks_have_the_cache_of_the_fullest() -> None:
    gpu = StandIn()
    group: Any = Ranks([7, 0, 0, 0, 0, 0])
    assert gpu_blocks(cache_size(), gpu.build, gpu, "cpu", group) == 7
    group = Ranks([0, GIB, 30 * GIB, 0, 0, 0])
    with pytest.raises(ValueError, match=r"1\.00 GiB that a rank may use .* 30\.00 GiB of weights"):
        gpu_blocks(cache_size(), gpu.build, gpu, "cpu", group)


def test_ranks_meet_after_each_part_of_the_measurement() -> None:
    """Rank 0 runs a draft model alone, for longer than a collective waits."""
    gpu = StandIn()
    group: Any = Ranks([7, 0, 0, 0, 0, 0], gpu.events)

    def build(num_blocks: int) -> list[Any]:
        return [StandInRunner(gpu, num_blocks), StandInRunner(gpu, num_blocks)]

    gpu_blocks(cache_size(), build, gpu, "cpu", group)
    assert [event for event in gpu.events if event != "release"] == [
        *([LIMITS] * 2),
        "stepped",
        *([("capture", 100)] * 2),
        "measured",
        "collective",
    ]


def test_ranks_meet_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Ranks([])
    monkeypatch.setattr(ModelRunner, "warmup", lambda runner, limits: group.events.append(runner))
    folder = str(make_tiny_model(tmp_path, num_hidden_layers=1))
    config = RankConfig(
        model=folder, draft_model=folder, identity=IDENTITY, dtype="float32", kv_cache_bytes=2**20
    )
    rank = load_rank(config, group)
    assert rank.num_blocks > 0
    first, model, draft, last = group.events
    assert (first, last) == ("allocated", "warm")
    assert model is not draft


def test_a_step_that_does_not_fit_says_so() -> None:
    gpu = StandIn()

    def fail(num_blocks: int) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    with pytest.raises(ValueError, match="a step of 2000 tokens and 100 sequences does not fit"):
        gpu_blocks(cache_size(), fail, gpu, "cuda", None)


def test_ranks_on_cpus_share_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1 GiB each, as all pages are taken at the start."""
    for total, ranks, expected in ((64, 2, 1024), (8, 2, 1024), (4, 2, 512), (2, 1, 512)):
        monkeypatch.setattr(memory, "total_memory", lambda total=total: total * GIB)
        size = cache_size(share=1 / ranks, utilization=0.25)
        assert host_counts(size, None).num_blocks == expected * 2**20 // BLOCK
    assert host_counts(cache_size(cache_bytes=5 * GIB), None).num_blocks == 5 * GIB // BLOCK
    group: Any = Ranks([3 * BLOCK])
    assert host_counts(size, group).num_blocks == 3
    monkeypatch.setattr(memory, "total_memory", lambda: 2**20)
    with pytest.raises(ValueError, match=r"kv_cache_gb: the default here .* 16 tokens; set kv_cac"):
        host_counts(size, None)


def test_every_rank_on_cpus_has_the_states_of_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    state = 50 * 2**20
    sizes = CacheBytes(block=BLOCK, state=state)
    monkeypatch.setattr(memory, "total_memory", lambda: 64 * GIB)
    size = cache_size(bytes=sizes, share=0.5, utilization=0.25)
    counts = host_counts(size, None)  # of 1 GiB
    assert counts.num_states == GIB // 2 // state
    assert counts.num_blocks == (GIB - counts.num_states * state) // BLOCK
    group: Any = Ranks([GIB // 2])
    counts = host_counts(size, group)
    assert counts.num_states == GIB // 4 // state
    assert counts.num_blocks == (GIB // 2 - counts.num_states * state) // BLOCK
    given = cache_size(bytes=sizes, cache_bytes=2 * GIB, state_slots=7)
    assert host_counts(given, None).num_states == 7
    few = cache_size(bytes=sizes, cache_bytes=2 * GIB, max_sequences=2)
    assert host_counts(few, None).num_states == 4 * 2
    for least in (2, 3):
        none = cache_size(bytes=sizes, cache_bytes=2 * GIB, state_slots=1, sequence_states=least)
        with pytest.raises(ValueError, match=f"^state_slots: 1 holds no .* takes {least}; raise"):
            host_counts(none, None)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors on the fake GPU; implements `DeviceMemory`.

    The allocator keeps all memory that was ever in use until a capture begins, as
    `torch.cuda.graph` makes it do, and captures use a pool of their own.
    """

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = total
        self.live = 0
        self.peak = 0
        self.pool = 0
        self._users: dict[int, int] = {}  # by storage: tensors over it

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.is_cuda:
                self._add(each)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._users:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        self._users[key] = self._users.get(key, 0) + 1
        weakref.finalize(tensor, self._drop, key, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.live -= num_bytes

    def capture(self, launch: graphs.Launch) -> tuple[Callable[[], object], torch.Tensor]:
        before = self.peak = self.live
        replay, logits = record(launch)
        self.pool = max(self.pool, self.peak - before)
        self.peak = self.live
        return replay, logits

    def reserved(self) -> int:
        return self.peak + self.pool

    def free_and_total(self) -> tuple[int, int]:
        return self.total - self.reserved(), self.total

    def release(self) -> None:
        gc.collect()
        self.peak = self.live
        self.pool = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with fake_cuda() as found:
        # The results have no numbers to collect.
        monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: self.launch(plan))
        yield found


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs on the GPU itself")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_steps_on_a_fake_gpu_stay_within_the_budget(
    watch: Watch, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured cache fills the rank's part of the GPU, and the largest steps fit beside it."""
    config = config_of(family, vocab_size=4096)
    total = 60 * 2**20
    with Allocations(total) as gpu, watch.loading():
        monkeypatch.setattr(graphs, "cuda_capture", lambda: gpu.capture)
        model = real(build_model)(config, torch.bfloat16, device_type="cuda")
        load_weights(model, lambda part, target: None, torch.device("cuda"))
        layout = KvLayout(layers=config.layers, dtype="bfloat16", model="")
        checkpoint: Any = SimpleNamespace(
            config=config, folder=None, kv_layout=lambda dtype, cache_dtype: layout
        )
        loaded = LoadedModel(
            checkpoint=checkpoint,
            model=model,
            dtype="bfloat16",
            device=torch.device("cuda"),
            group=None,
            batch_invariant=False,
        )
        size = cache_size(
            bytes=CacheBytes.of(kv_layout(config, "bfloat16"), 1, block_size=16),
            limits=StepLimits(num_tokens=256, num_rows=40),
        )

        def build(num_blocks: int) -> list[ModelRunner]:
            return [ModelRunner.over(loaded, num_blocks=num_blocks, block_size=16)]

        use, scratch = measure(size, build, gpu, None)
        assert use.rest == 0
        assert min(use.weights, use.activations, use.graphs, scratch) > 0
        # Logits of all rows, as scores in float32.
        assert use.activations > 4 * 40 * config.vocab_size
        number = gpu_blocks(size, build, gpu, "cuda", None)
        gpu.release()
        (runner,) = build(number)
        runner.warmup(size.limits)
        assert runner.num_graph_replays() == 0
        runner.run_largest_steps(size.limits)  # beside the graphs
        assert 0.97 * 0.9 * total < gpu.reserved() <= 0.9 * total
