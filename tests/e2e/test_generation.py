"""The demo model behind both pools: beam search as transformers', choices, conversations."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.scheduling import registry
from tandem.router.scheduling.policy import Candidate
from tandem.router.scheduling.prefix_index import Prefix
from tandem.tests import demo_model
from tandem.tests.fleet import Fleet, fleet, split_fleet
from tandem.tests.peers import IDENTITY
from tandem.tests.service import expected_tokens
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.token_request import token_request
from tandem.tests.waits import WAIT
from tandem.workers.engine.plan import Executor, OnLayers, Samples, StepPlan
from tandem.workers.tp.rank import Rank, RankConfig, load_rank

BEAM_PROMPTS = (3, 16, 17, 100)  # tokens
BEAM_TOKENS = 10


class Counting(Executor):
    """Counts the prompt tokens that an executor computes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_prompt_tokens = 0

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        self.num_prompt_tokens += sum(
            len(step.token_ids) for step in plan.sequences if len(step.token_ids) > 1
        )
        return self._executor.launch(plan, on_layers)


@asynccontextmanager
async def counted_fleet(
    prefill: int, decode: int, load: Callable[[], Rank]
) -> AsyncIterator[tuple[Fleet, list[Counting]]]:
    counters: list[Counting] = []

    def rank(role: str) -> Rank:
        loaded = load()
        counters.append(Counting(loaded.executor))
        return replace(loaded, executor=counters[-1])

    async with fleet(prefill, decode, rank=rank) as running:
        yield running, counters


def demo_rank(dtype: str = "float32") -> Rank:
    return demo_model.rank(num_threads=1, dtype=dtype)


async def choices_of(running: Fleet, **fields: object) -> dict[int, list[int]]:
    """The token ids of every choice of one request."""
    found: dict[int, list[int]] = {}
    request = token_request(**fields)  # type: ignore[arg-type]
    async for delta in running.dispatcher.generate(request, inference_pb2.Timeline()):
        found.setdefault(delta.choice, []).extend(delta.ids)
    return found


@pytest.fixture(scope="module")
def beam_reference() -> list[list[int]]:
    """What transformers' beam search of width 4 finds for each prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.folder(), dtype=torch.float32)
    found = []
    for prompt in demo_model.prompts(BEAM_PROMPTS):
        ids = torch.tensor([prompt])  # [1, num_tokens]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=4,
            max_new_tokens=BEAM_TOKENS,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("prefill", [1, 0])
async def test_beam_search_equals_transformers(
    prefill: int, beam_reference: list[list[int]]
) -> None:
    """All at the same time, apart and together."""
    beams = inference_pb2.BeamSearch(width=4, length_penalty=1.0)
    async with counted_fleet(prefill, 1, demo_rank) as (running, _):
        found = await asyncio.gather(
            *(
                choices_of(
                    running,
                    prompt=prompt,
                    max_tokens=BEAM_TOKENS,
                    name=f"beam-{n}",
                    beam_search=beams,
                )
                for n, prompt in enumerate(demo_model.prompts(BEAM_PROMPTS))
            )
        )
    assert [each[0] for each in found] == [_trimmed(tokens) for tokens in beam_reference]


def _trimmed(tokens: Sequence[int]) -> list[int]:
    """Without the padding after the end."""
    kept = list(tokens)
    while kept and kept[-1] == 0:
        kept.pop()
    return kept


@pytest.mark.parametrize("prefill", [1, 0])
async def test_four_choices_cost_one_prefill(prefill: int, tiny_model: Path) -> None:
    """And each is what a request of its own, with its own seed, gives."""
    numbers = random.Random(2)
    prompt = [numbers.randrange(3, 400) for _ in range(200)]
    config = RankConfig(
        model=str(tiny_model), identity=IDENTITY, dtype="float32", kv_cache_bytes=1 << 22
    )
    sampling = inference_pb2.SamplingParams(
        temperature=1, top_k=0, top_p=1, min_p=0, seed=77, typical_p=1, repetition_penalty=1
    )
    async with counted_fleet(prefill, 1, lambda: load_rank(config)) as (running, counters):
        together = await choices_of(
            running, prompt=prompt, max_tokens=20, sampling=sampling, num_choices=4, name="all"
        )
        assert sum(counter.num_prompt_tokens for counter in counters) == len(prompt)
        for choice in range(4):
            alone = inference_pb2.SamplingParams()
            alone.CopyFrom(sampling)
            alone.seed += choice
            one = await choices_of(
                running, prompt=prompt, max_tokens=20, sampling=alone, name=f"one-{choice}"
            )
            assert one[0] == together[choice]
    assert len({tuple(tokens) for tokens in together.values()}) == 4


async def test_conversations_find_their_prefix() -> None:
    """3 conversations of 3 turns with one system prompt of 600 tokens over 2 + 2 workers: at least
    85 % of the prompt tokens after the first turn come from a prefix cache, and none of these is
    computed.
    """
    tokenizer = Tokenizer.load(demo_model.folder())
    words = random.Random(5)
    topics = [
        "rivers",
        "clocks",
        "mountains",
        "engines",
        "harvests",
        "letters",
        "bridges",
        "winters",
    ]
    system = ""
    while len(await tokenizer.encode(system)) < 600:
        system += (
            f"Rule: when asked of {words.choice(topics)}, speak of {words.choice(topics)} too. "
        )
    usages: list[inference_pb2.Usage] = []
    ttft: dict[bool, list[float]] = {
        True: [],
        False: [],
    }  # by: the first turn of the first conversation
    async with counted_fleet(2, 2, lambda: demo_rank("bfloat16")) as (running, counters):
        model = ServedModel(name="demo", tokenizer=tokenizer, context_tokens=4096)
        completions = GenerationService([model], running.dispatcher)
        chats = [
            inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="system", content=system)])
            for _ in range(3)
        ]
        for turn in range(3):
            for number, chat in enumerate(chats):
                chat.messages.add(
                    role="user", content=f"Tell me of {topics[(turn + number) % 8]}, please."
                )
                request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(chat=chat))
                request.sampling.temperature = 0
                request.stopping.max_tokens = 16
                timeline = inference_pb2.Timeline()
                texts, usage = [], inference_pb2.Usage()
                accepted = await completions.accept(
                    request, RequestContext(arrived=time.monotonic())
                )
                async for message in completions.run(accepted, timeline):
                    texts.append(message.text)
                    usage = message.usage if message.HasField("usage") else usage
                chat.messages.add(role="assistant", content="".join(texts))
                ttft[turn == number == 0].append(timeline.ttft_seconds)
                usages.append(usage)
    later = usages[len(chats) :]
    share = sum(usage.cached_tokens for usage in later) / sum(
        usage.prompt_tokens for usage in later
    )
    warm, cold = statistics.median(ttft[False]), ttft[True][0]
    print(
        f"\n{share:.1%} of the prompt tokens of later turns cached; TTFT {cold * 1e3:.0f} ms cold, "
        f"{warm * 1e3:.0f} ms"
    )
    assert share >= 0.85
    uncached = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    assert sum(counter.num_prompt_tokens for counter in counters) <= uncached


@pytest.mark.parametrize("kind", ["windows", "states"])
async def test_conversations_continue_from_resume_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """2 conversations of 5 turns over 2 + 2 workers, of a model with blocks of 32 tokens and
    windows of 24, and of one with states: at least 85 % of the tokens of later prompts come from a
    prefix cache, and the answers are those of transformers.
    """

    def most(num_tokens: int, prefill: Candidate, others: Sequence[Candidate]) -> Candidate | None:
        return max(others, key=lambda other: other.matched_tokens, default=None)

    monkeypatch.setattr(registry, "choose_holder", most)  # however fast the workers seem to be
    if kind == "windows":
        folder = make_tiny_model(tmp_path, "gemma3")
    else:
        folder = make_tiny_decoder(tmp_path, "qwen3_5_text")
    numbers = random.Random(7)
    system = [numbers.randrange(3, 400) for _ in range(400)]
    prompts = [system + [numbers.randrange(3, 400) for _ in range(9)] for _ in range(2)]
    turns: list[tuple[int, int]] = []  # cached tokens and tokens of each prompt
    async with split_fleet(folder, {"prefill": [1, 1], "decode": [1, 1]}) as running:
        for worker in running.workers:
            assert len(worker.info().tables) == (2 if kind == "windows" else 1)
            assert (worker.info().num_states > 0) == (kind == "states")
        tables = running.workers[0].info().tables
        alignment = lcm(*(table.block_size for table in tables))
        for turn in range(5):
            for prompt in prompts:
                answer, timeline = await running.generate(
                    token_request(prompt, 20, ignore_eos=True)
                )
                if turn == 4:
                    assert answer == expected_tokens(folder, [prompt], 20)[0]
                turns.append((timeline.cached_tokens, len(prompt)))
                prompt += answer
                await _known(running, prompt, alignment)
                prompt += [numbers.randrange(3, 400) for _ in range(9)]
        restored = [(await worker.status()).num_restored_tokens for worker in running.workers]
    assert sum(restored[:2]) > 0  # prefill workers have fetched prefixes from decode workers
    share = sum(cached for cached, _ in turns[2:]) / sum(count for _, count in turns[2:])
    print(f"\n{share:.1%} of the prompt tokens of later turns cached")
    assert share >= 0.85


async def test_a_request_for_more_states_than_a_worker_has_is_refused(tmp_path: Path) -> None:
    """Each choice and each beam takes two."""
    folder = make_tiny_decoder(tmp_path, "lfm2")
    config = RankConfig(
        model=str(folder),
        identity=IDENTITY,
        dtype="float32",
        kv_cache_bytes=1 << 20,
        state_slots=7,
    )
    served = ServedModel(name="tiny", tokenizer=Tokenizer.load(folder), context_tokens=2048)
    problem = "must be at most 3 on this worker"
    async with fleet(0, 1, rank=lambda role: load_rank(config)) as running:
        server = await ApiServers.start(GenerationService([served], running.dispatcher))
        try:
            async with AsyncClient(server.grpc_address) as client:
                wide: list[dict[str, Any]] = [{"n": 4}, {"beam_width": 4}]
                for fields in wide:
                    with pytest.raises(InvalidArgument, match=problem):
                        await client.generate("dog", max_tokens=3, **fields)
                assert len((await client.generate("dog", max_tokens=3, n=3)).choices) == 3
            async with httpx.AsyncClient(
                base_url=f"http://{server.http_address}", timeout=WAIT
            ) as http:
                body = {"model": "tiny", "prompt": "dog", "max_tokens": 3, "n": 4}
                answer = await http.post("/v1/completions", json=body)
                assert answer.status_code == 400
                assert problem in answer.json()["error"]["message"]
        finally:
            await server.stop(0)


async def _known(running: Fleet, tokens: Sequence[int], alignment: int) -> None:
    """Waits until the router has heard of the last resume point of a finished answer."""
    num_tokens = (len(tokens) - 1) // alignment * alignment

    def held() -> set[int]:
        matches = running.registry._prefixes.match(Prefix(tokens))
        return {matches.num_tokens(each.worker_id) for each in running.registry.workers()}

    async with asyncio.timeout(WAIT):
        while num_tokens not in held():
            await asyncio.sleep(0.005)
