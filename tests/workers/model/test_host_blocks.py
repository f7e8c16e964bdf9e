"""KV cache that comes back from host memory, on real models: the same bytes, the same tokens."""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.tests.fleet import split_fleet
from tandem.tests.tiny import make_tiny_model
from tandem.tests.token_request import token_request
from tandem.tests.workers.model.helpers import GREEDY, load, prompt
from tandem.workers.engine.config import Budgets, EngineConfig
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.events import Admitted, NewTokens
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.engine.sequence import SequenceSpec, Task
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.model.kernels.c import cpu
from tandem.workers.model.kv.store import HostBlocks, PagedKv
from tandem.workers.model.runner import ModelRunner

LAYERS = tuple(
    LayerGeometry(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, window=window)
    for heads, kv_heads, dim, window in [
        (6, 2, 16, None),
        (4, 4, 32, 20),
        (6, 2, 16, 20),
        (4, 1, 16, None),
    ]
)
SEEDED = SamplingParams(temperature=0.8, top_k=40, seed=7)
NUM_TURNS, NUM_TOKENS = 3, 10
is_exact = cpu.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [("float32", "auto"), *(("bfloat16", each) for each in ("auto", "int8", "fp8", "int4"))],
)
def test_blocks_of_all_groups_come_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, dtype: str, cache_dtype: str
) -> None:
    """One thread copies by numpy, several by torch."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    check_blocks_come_back("cpu", dtype, cache_dtype)


def check_blocks_come_back(device: str, dtype: str, cache_dtype: str = "auto") -> None:
    layout = KvLayout(layers=LAYERS, dtype=dtype, model="m", cache_dtype=cache_dtype)
    kv = PagedKv(layout, num_blocks=8, block_size=4, device=torch.device(device), tp=2, rank=1)
    generator = torch.Generator().manual_seed(0)
    for tensor in kv.tensors:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8))
    before = [tensor.view(torch.uint8).clone() for tensor in kv.tensors]
    host = HostBlocks(kv, 3)
    host.save([(5, 2), (1, 0)])
    for tensor in kv.tensors:
        tensor.view(torch.uint8)[:, :, [1, 2, 5]] = 0
    host.load([(2, 1), (0, 2)])
    for tensor, old in zip(kv.tensors, before, strict=True):
        raw = tensor.view(torch.uint8)
        assert torch.equal(raw[:, :, [1, 2]], old[:, :, [5, 1]])
        assert torch.equal(raw[:, :, [0, 3, 4, 6, 7]], old[:, :, [0, 3, 4, 6, 7]])


def test_host_memory_that_is_not_there_is_refused() -> None:
    layout = KvLayout(layers=LAYERS, dtype="float32", model="m")
    kv = PagedKv(layout, num_blocks=8, block_size=16, device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"kv_host_gb: .* GiB do not fit into the .* GiB that are available"
    ):
        HostBlocks(kv, 1 << 40)


class FakeCudart:
    """Records what is registered, address by address."""

    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self._error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append("register")
        if not self._error:
            self.registered[address] = num_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        del self.registered[address]
        return 0


@pytest.fixture
def kv_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCudart], PagedKv]:
    """A cache in this machine's memory that calls itself a GPU's."""

    def make(cudart: FakeCudart) -> PagedKv:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(
            torch.cuda, "synchronize", lambda device: cudart.calls.append("synchronize")
        )
        layout = KvLayout(layers=LAYERS, dtype="float32", model="m")
        kv = PagedKv(layout, num_blocks=8, block_size=4, device=torch.device("cpu"), tp=2, rank=1)
        kv.device = torch.device("cuda")
        return kv

    return make


def test_host_memory_of_a_gpu_is_pinned_to_the_byte(
    kv_of_a_gpu: Callable[[FakeCudart], PagedKv],
) -> None:
    """And unpinned with the blocks, after the copies in progress."""
    cudart = FakeCudart()
    kv = kv_of_a_gpu(cudart)
    block_bytes = kv.block_bytes
    host = HostBlocks(kv, 5)
    assert list(cudart.registered.values()) == [5 * block_bytes]
    assert 5 * block_bytes & (5 * block_bytes - 1)  # no power of two
    (address,) = cudart.registered
    assert min(own.data_ptr() for _, own in host._parts) == address
    for tensor in kv.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in kv.tensors]
    host.save([(6, 4)])
    host.load([(4, 1)])
    for tensor, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor[:, :, 1], old[:, :, 6])
    del host
    gc.collect()
    assert cudart.calls == ["register", "synchronize", "unregister"]


def test_host_memory_that_cannot_be_pinned_is_refused(
    kv_of_a_gpu: Callable[[FakeCudart], PagedKv],
) -> None:
    cudart = FakeCudart(error=2)
    with pytest.raises(ValueError, match=r"^kv_host_gb: .* CUDA error 2; lower it$"):
        HostBlocks(kv_of_a_gpu(cudart), 5)
    gc.collect()
    assert cudart.calls == ["register"]


def converse(
    runner: ModelRunner, kind: SamplingParams, num_blocks: int, num_host_blocks: int, overlap: bool
) -> tuple[list[list[int]], int, int]:
    """Returns the tokens of each turn of five conversations that return in turns, how many tokens
    of them had their KV cache when they came, and how many of these from host memory.
    """
    config = EngineConfig(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        tables=runner.kv.tables,
        overlap=overlap,
        budgets=Budgets(chunk_tokens=48, mixed_chunk_tokens=16, growth_tokens=16),
    )
    engine, made, num_cached = Engine(runner, config), list[list[int]](), 0
    histories = [prompt(37 + number, number) for number in range(5)]
    for turn in range(NUM_TURNS):
        for first in (0, 2):  # two or three at a time
            answers: dict[int, list[int]] = {}
            for number in range(first, first + 2 + first // 2):
                answers[number] = []
                tokens = tuple(histories[number])
                sequence = SequenceSpec(
                    id=number,
                    task=Task.COLOCATED,
                    tokens=tokens,
                    max_tokens=NUM_TOKENS,
                    sampling=kind,
                )
                engine.submit(sequence)
            while engine.has_work:
                for event in engine.step():
                    if isinstance(event, NewTokens):
                        answers[event.id] += event.token_ids
                    elif isinstance(event, Admitted):
                        num_cached += event.num_cached
                engine.check_integrity()
            for number, tokens_made in answers.items():
                histories[number] += tokens_made + prompt(9, 100 * turn + number)
            made += answers.values()
    return made, num_cached, engine.requests.num_loaded_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("family", "dtype", "cache_dtype"),
    [
        ("llama", "float32", "auto"),
        ("gemma3", "bfloat16", "auto"),
        ("llama", "bfloat16", "int8"),
        ("llama", "bfloat16", "int4"),
    ],
)
def test_conversations_go_on_with_the_same_tokens(
    tmp_path: Path, family: str, dtype: str, cache_dtype: str, kind: SamplingParams, overlap: bool
) -> None:
    if dtype == "bfloat16" and not is_exact:
        pytest.skip("tokens depend on the batch without kernels of ours")
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 32} if cache_dtype != "auto" else {}
    folder = make_tiny_model(tmp_path / "tiny", family, **sizes)
    roomy = load(folder, dtype=dtype, cache_dtype=cache_dtype)
    expected, num_cached, num_restored = converse(roomy, kind, 128, 0, overlap)
    assert num_restored == 0 < num_cached
    small = load(folder, dtype=dtype, cache_dtype=cache_dtype, num_blocks=18, num_host_blocks=40)
    made, num_found, num_restored = converse(small, kind, 18, 40, overlap)
    assert made == expected
    assert num_found == num_cached
    assert num_restored > num_cached / 2


async def answers(
    folder: Path, tp: Mapping[str, Sequence[int]], prompts: Sequence[Sequence[int]], **config: int
) -> tuple[list[list[int]], list[int]]:
    """Returns the answers to prompts, each asked twice in turns, and how many tokens each worker
    restored.
    """
    async with split_fleet(folder, tp, **config) as fleet:
        made = []
        for number, tokens in enumerate([*prompts, *prompts]):
            request = token_request(tokens, NUM_TOKENS, name=str(number), ignore_eos=True)
            made.append((await fleet.generate(request))[0])
        return made, [status.num_restored_tokens for status in await fleet.statuses()]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
async def test_ranks_of_a_worker_save_and_restore_alike(
    tmp_path: Path, prefill: int, decode: int
) -> None:
    """Both workers have room for little more than one prompt: the decode worker's imports overwrite
    what is saved.
    """
    folder = make_tiny_model(tmp_path / "tiny", num_attention_heads=8, num_key_value_heads=2)
    tp = {"prefill": [prefill], "decode": [decode]}
    prompts = [prompt(150, seed) for seed in range(6)]
    expected, found = await answers(folder, tp, prompts)
    assert found == [0, 0]
    runner = load(folder)
    size = 20 * runner.kv.block_bytes
    made, restored = await answers(
        folder, tp, prompts, kv_cache_bytes=size, kv_host_bytes=16 * size
    )
    assert made == expected
    assert min(restored) >= 5 * 128
