"""Runs requests on an engine in this process, one by one or as the load of `tandem bench`."""

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from time import perf_counter

import torch

from tandem.cluster.bench.load import send_load
from tandem.cluster.bench.metrics import RequestRecord
from tandem.cluster.bench.options import LoadOptions
from tandem.cluster.bench.target import StreamCompletion
from tandem.cluster.bench.workload import BenchPrompt
from tandem.cluster.config import load_config
from tandem.cluster.local.engine import LocalEngine
from tandem.cluster.local.llm import LLM
from tandem.cluster.settings import NULL
from tandem.cluster.store.store import resolve_model
from tandem.proto import inference_pb2
from tandem.router.client.request import generate_request, text_prompt
from tandem.router.client.results import Collector
from tandem.router.client.types import Completion, Options
from tandem.workers.model.config import ModelConfig
from tandem.workers.model.registry import load_model_config

GREEDY = Options(temperature=0.0, ignore_eos=True)


@asynccontextmanager
async def open_engine(
    model: str, *, dtype: str, max_sequences: int, kv_cache_gb: float
) -> AsyncIterator[LocalEngine]:
    """Loads a model without prefix cache, for many requests of which none waits for a token."""
    settings: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "prefix_caching": False,
        "prefill.replicas": 0,
        "kv_transports": (),
        "decode.max_sequences": max_sequences,
        "decode.mixed_chunk_tokens": 512,  # as in tandem.LLM
        "decode.mixed_step_factor": NULL,
        "decode.kv_cache_gb": kv_cache_gb,
        "hang_seconds": 120.0,
    }
    engine = await LocalEngine.start(load_config(overrides=settings), resolve_model(model))
    try:
        yield engine
    finally:
        await engine.close()


def target_of(engine: LocalEngine) -> StreamCompletion:
    """Returns the function by which the load generator sends a request to an engine."""

    async def stream_completion(prompt: BenchPrompt, chunk_times: list[float]) -> tuple[int, int]:
        options = Options(**GREEDY, max_tokens=prompt.max_tokens)
        request = await engine.prepare(generate_request(text_prompt(prompt.prompt), options))
        collector = Collector()
        async with aclosing(engine.messages(request, inference_pb2.Timeline())) as messages:
            async for message in messages:
                if collector.delta(message).token_ids:
                    chunk_times.append(perf_counter())
        usage = collector.completion().usage
        return usage.prompt_tokens, usage.completion_tokens

    return stream_completion


async def send_all(
    target: StreamCompletion, prompts: Sequence[BenchPrompt], concurrency: int
) -> list[RequestRecord]:
    """Sends requests, `concurrency` at a time. Raises RuntimeError if one fails."""
    load = LoadOptions(concurrency=concurrency, num_prompts=len(prompts))
    return checked(await send_load(target, iter(prompts), load))


def checked(records: list[RequestRecord]) -> list[RequestRecord]:
    """Returns the same records. Raises RuntimeError if a request has failed."""
    for record in records:
        if record.failure is not None:
            raise RuntimeError(f"a request failed: {record.failure.kind} {record.failure.detail}")
    return records


def stream_once(
    llm: LLM, prompt: str | Sequence[int], options: Options
) -> tuple[Completion, list[float]]:
    """Returns a completion, and the seconds after which each of its tokens arrived."""
    arrivals: list[float] = []
    began = perf_counter()
    with llm.stream(prompt, options) as stream:
        for delta in stream:
            now = perf_counter()
            arrivals += [now - began for _ in delta.token_ids]
        completion = stream.completion()
    return completion, arrivals


def stream_rate(arrivals: Sequence[float]) -> float:
    """Returns the tokens per second of a stream, from the time at which it was sent."""
    return len(arrivals) / arrivals[-1]


def config_of(model: str) -> ModelConfig:
    """Returns the config of a model."""
    return load_model_config(resolve_model(model))


def random_prompts(
    vocab_size: int, num_tokens: int, max_tokens: Sequence[int], seed: object = 0
) -> Iterator[BenchPrompt]:
    """Yields a prompt of random tokens for each number of output tokens."""
    drawn = random.Random(f"{seed}")
    for each in max_tokens:
        ids = drawn.choices(range(vocab_size), k=num_tokens)
        yield BenchPrompt(prompt=ids, max_tokens=each)


def conditions(model: str, dtype: str) -> str:
    """Returns the note that names model, dtype, threads and date."""
    return (
        f"{model.rpartition('/')[2]}, {dtype}, {torch.get_num_threads()} threads, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )
