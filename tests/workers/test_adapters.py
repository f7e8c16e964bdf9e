"""LoRA adapters on workers, over real sockets: several at once through both pools, eviction and
reload, suspended streams, caches that never cross, and adapters that a worker cannot have.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from tandem.proto import worker_pb2
from tandem.proto.errors import Overloaded, Unavailable
from tandem.router.request import LoraAdapter
from tandem.tests.adapters import make_adapter, peft_reference
from tandem.tests.fleet import VOCAB, Fleet, fake_rank, fleet, innermost, split_fleet
from tandem.tests.tiny import make_tiny_model
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.tests.workers.engine.fake import expected_tokens
from tandem.tests.workers.model.helpers import load, reference_greedy
from tandem.tests.workers.raw_session import ended, executor_of, submit, worker_of
from tandem.workers.model.adapter_folder import read_adapter
from tandem.workers.tp.adapter_loader import adapter_loader

PROMPT = [(7 * n) % 400 + 3 for n in range(70)]
NUM_TOKENS = 12
RANKS = {"one": 1, "four": 4, "eight": 8, "many": 40}
NAMES = ("base", *RANKS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return make_tiny_model(root / "model")


@pytest.fixture(scope="module")
def folders(root: Path, model: Path) -> dict[str, Path]:
    return {
        name: make_adapter(root / "adapters" / name, model, rank=rank, seed=rank)
        for name, rank in RANKS.items()
    }


@pytest.fixture(scope="module")
def expected(model: Path, folders: dict[str, Path]) -> dict[str, list[int]]:
    """What transformers and peft generate for PROMPT."""
    peft_model = peft_reference(model, folders)
    found = {}
    for name in NAMES:
        with chosen(peft_model, name):
            found[name] = reference_greedy(peft_model, PROMPT, 60)
    assert len({tuple(tokens[:NUM_TOKENS]) for tokens in found.values()}) == len(NAMES)
    return found


def chosen(peft_model: PeftModel, name: str) -> Any:
    if name == "base":
        return peft_model.disable_adapter()
    peft_model.set_adapter(name)
    return nullcontext()


def adapter(folders: dict[str, Path], name: str) -> LoraAdapter | None:
    if name == "base":
        return None
    folder = folders[name]
    return LoraAdapter(
        name=name, folder=str(folder), fingerprint=read_adapter(folder, 64).fingerprint
    )


async def generate(
    running: Fleet,
    folders: dict[str, Path],
    name: str,
    suffix: str = "",
    num_tokens: int = NUM_TOKENS,
) -> tuple[list[int], int]:
    """The tokens of PROMPT with an adapter, and how many tokens of it were cached."""
    request = token_request(
        PROMPT, num_tokens, name=name + suffix, adapter=adapter(folders, name), ignore_eos=True
    )
    tokens, timeline = await running.generate(request)
    return tokens, timeline.cached_tokens


@pytest.mark.parametrize(
    ("prefill", "decode"), [([1], [1]), ([2], [1]), ([1], [2]), ([], [1])], ids=str
)
async def test_four_adapters_and_the_base_model_through_both_pools(
    root: Path,
    model: Path,
    folders: dict[str, Path],
    expected: dict[str, list[int]],
    prefill: list[int],
    decode: Any,
) -> None:
    """All have the same prompt: whoever found another's KV cache would go on with other tokens."""
    tp = {"prefill": prefill, "decode": decode}
    async with split_fleet(
        model, tp, adapter_folders=(str(root / "adapters"),), chunk_tokens=32
    ) as running:
        for name in NAMES:
            assert await generate(running, folders, name, " alone") == (
                expected[name][:NUM_TOKENS],
                0,
            )
        for suffix in (" first", " again"):
            made = await asyncio.gather(
                *(generate(running, folders, name, suffix) for name in NAMES)
            )
            assert [tokens for tokens, _ in made] == [expected[name][:NUM_TOKENS] for name in NAMES]
            assert [cached for _, cached in made] == [64] * len(NAMES)


async def test_evicted_adapters_are_loaded_again(
    root: Path, model: Path, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    config: dict[str, Any] = {"adapter_folders": (str(root),), "max_loras": 2}
    async with split_fleet(model, {"prefill": [2], "decode": [1]}, **config) as running:
        for turn in range(2):
            for name in NAMES:
                tokens, cached = await generate(running, folders, name, f" {turn}")
                assert tokens == expected[name][:NUM_TOKENS]
                assert cached == 64 * turn, "a reloaded adapter finds its own cache"
        for worker in running.workers:
            prints = [read_adapter(folders[name], 64).fingerprint for name in ("eight", "many")]
            assert worker._requests.adapters.loaded == prints
            runner: Any = innermost(worker._rank.executor)
            assert len(runner.adapters._loaded) <= 3, "two, and one that leaves with the next step"


async def test_a_mixed_batch_after_all_its_adapters_were_evicted(
    root: Path, model: Path, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    """Four adapters and the base model, together and then alone, through both pools, after four
    others.
    """
    others = {
        f"other {seed}": make_adapter(root / "others" / str(seed), model, rank=2, seed=50 + seed)
        for seed in range(4)
    }
    prints = {read_adapter(folder, 64).fingerprint for folder in others.values()}
    wanted = [expected[name][:NUM_TOKENS] for name in NAMES]
    config: dict[str, Any] = {"adapter_folders": (str(root),), "max_loras": 4}
    async with split_fleet(model, {"prefill": [1], "decode": [1]}, **config) as running:
        for turn in (" first", " reloaded"):
            made = await asyncio.gather(*(generate(running, folders, name, turn) for name in NAMES))
            assert [tokens for tokens, _ in made] == wanted
            await asyncio.gather(*(generate(running, others, name, turn) for name in others))
            assert all(
                set(worker._requests.adapters.loaded) == prints for worker in running.workers
            )
        for name in NAMES:
            tokens, _ = await generate(running, folders, name, " alone")
            assert tokens == expected[name][:NUM_TOKENS]


async def test_a_suspended_stream_goes_on_with_its_adapter(
    root: Path, model: Path, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with split_fleet(
        model, {"prefill": [1], "decode": [1, 1]}, adapter_folders=(str(root),)
    ) as running:
        names = ("four", "eight")
        tasks = [
            asyncio.create_task(generate(running, folders, name, num_tokens=60)) for name in names
        ]
        async with asyncio.timeout(WAIT):
            while not (busy := [w for w in running.workers[1:] if w.load().num_running]):
                await asyncio.sleep(0)
        running.registry.update([*(worker.info() for worker in running.workers)])
        await busy[0].drain(0)
        made = await asyncio.gather(*tasks)
        assert [tokens for tokens, _ in made] == [expected[name] for name in names]


def loads(reason: str = "") -> Callable[[int, worker_pb2.Adapter], str]:
    """Stands for the loading of adapters by a rank."""

    def load(number: int, adapter: worker_pb2.Adapter) -> str:
        return reason

    return load


def raises(error: Exception) -> Callable[..., None]:
    def load(*_: object) -> None:
        raise error

    return load


def named(number: int) -> LoraAdapter:
    return LoraAdapter(
        name=f"adapter {number}", folder="/adapters", fingerprint=bytes([number]) * 16
    )


async def test_a_worker_that_cannot_load_an_adapter_ends_no_request() -> None:
    """Requests go on at the other decode worker."""
    broken = replace(fake_rank(), load_adapter=loads("adapter_config.json: cannot be read"))
    decode = [broken, replace(fake_rank(), load_adapter=loads())]
    sound = replace(fake_rank(), load_adapter=loads())
    async with fleet(
        1, 2, rank=lambda role: decode.pop() if role == "decode" else sound
    ) as running:
        causes: list[str] = []
        while not causes:
            # At once, so that both workers get some: each prefers the worker with the least load.
            prompts = [[number, *PROMPT] for number in range(4)]
            requests = (token_request(prompt, 8, adapter=named(1)) for prompt in prompts)
            results = await asyncio.gather(*map(running.generate, requests))
            for prompt, (tokens, timeline) in zip(prompts, results, strict=True):
                assert tokens == expected_tokens(prompt, 8, VOCAB)
                causes += [each.cause for each in timeline.interruptions]
        assert set(causes) == {"unable"}
    assert executor_of(broken).num_tokens == 0


async def test_a_request_whose_adapter_no_worker_can_load_may_be_sent_again() -> None:
    rank = replace(fake_rank(), load_adapter=loads("adapter_config.json: cannot be read"))
    async with fleet(0, 1, rank=lambda role: rank) as running:
        with pytest.raises(Unavailable) as caught:
            await running.generate(token_request(PROMPT, 8, adapter=named(1)))
        reason = "adapter: adapter_config.json: cannot be read"
        assert caught.value.message == f"no worker can serve the request now: {reason}"
        assert executor_of(rank).num_tokens == 0
        await running.generate(token_request(PROMPT, 8))


async def test_a_worker_without_adapters_refuses_them() -> None:
    async with worker_of(fake_rank()) as (_, session):
        await session.send(
            submit(adapter=worker_pb2.Adapter(folder="/adapters", fingerprint=bytes(16)))
        )
        failure = await session.failure()
        assert failure.kind == worker_pb2.FAILURE_KIND_UNABLE
        assert failure.message == "adapter: this worker takes no adapters"
        await session.send(submit("b", adapter=worker_pb2.Adapter(folder="/adapters")))
        assert (await session.failure()).message == "adapter: needs 16 bytes of fingerprint"


async def test_no_adapter_is_evicted_while_it_is_in_use() -> None:
    rank = replace(fake_rank(step_seconds=0.005), load_adapter=loads())
    async with worker_of(rank, max_loras=1) as (worker, session):
        first, second = (
            worker_pb2.Adapter(folder="/adapters", fingerprint=named(number).fingerprint)
            for number in (1, 2)
        )
        await session.send(submit("a", adapter=first, max_tokens=500))
        await session.until(lambda output: bool(output.tokens.ids))
        await session.send(submit("b", adapter=second))
        failure = await session.failure()
        assert failure.kind == worker_pb2.FAILURE_KIND_FULL
        assert failure.message == "1 adapters are in use (max_loras)"
        assert await worker.load_adapter(second) == "", "it will be loaded when there is a place"
        await session.send(worker_pb2.Cancel(request_id="a", attempt=1))
        await session.send(submit("c", adapter=second))
        await session.until(ended)
        assert worker._requests.adapters.loaded == [second.fingerprint]


async def test_full_workers_are_an_overload() -> None:
    rank = replace(fake_rank(step_seconds=0.05), load_adapter=loads())
    async with fleet(0, 1, rank=lambda role: rank, max_loras=1) as running:
        first = asyncio.create_task(running.generate(token_request(PROMPT, 100, adapter=named(1))))
        async with asyncio.timeout(WAIT):
            while not running.workers[0].load().num_running:
                await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await running.generate(token_request(PROMPT, 8, adapter=named(2)))
        running.hurry()
        await first


def test_a_rank_loads_only_what_was_meant_and_from_configured_folders(
    root: Path,
    model: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = load(model)
    load_here = adapter_loader(runner, [str(root / "adapters")], max_rank=8)
    fingerprint = read_adapter(folders["eight"], 64).fingerprint

    def reason(folder: Path, given: bytes = fingerprint) -> str:
        return load_here(1, worker_pb2.Adapter(folder=str(folder), fingerprint=given))

    assert reason(folders["eight"]) == ""
    for error, told in (
        (MemoryError(), "folder: the adapter does not fit into memory"),
        (RuntimeError("can't allocate memory"), "folder: the adapter cannot be loaded"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(runner.adapters, "load", raises(error))
            assert reason(folders["eight"]) == told
    assert reason(folders["four"]) == "folder: its files have changed since the adapter was loaded"
    assert (
        reason(folders["many"])
        == "adapter_config.json: r: 40 is above the maximum of 8 (max_lora_rank)"
    )
    outside = "folder: is outside of the configured adapter folders"
    assert reason(model) == outside
    assert reason(root / "adapters" / ".." / "model") == outside
    assert reason(Path("a\0b")) == "folder: cannot be read"
    assert reason(root / "adapters" / "gone") == "adapter_config.json: the folder does not exist"
    link = root / "adapters" / "link"
    link.symlink_to(model)
    assert reason(link) == outside
    link.unlink()
