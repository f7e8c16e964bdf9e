"""`tandem explain`: its figures are those of `plan cost`, of the timeline and of the API."""

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem import LLM
from tandem.cluster.arithmetic import make_cost
from tandem.cluster.cli.main import app
from tandem.cluster.explain.cost import read_model_config
from tandem.cluster.explain.gather import CompletionStream, Subject, explain
from tandem.cluster.explain.page import render_page, write_page
from tandem.cluster.explain.record import Explanation
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import InvalidArgument, Unavailable
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import Client
from tandem.router.client.types import Completion, Options
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.browser import chromium, problems, set_window, text
from tandem.tests.fleet import split_fleet
from tandem.tests.tiny import make_tiny_model
from tandem.workers.model.costs.roofline import Roofline
from tandem.workers.model.loader import weight_shapes

DEMO = "smollm2-135m-instruct"
PROMPT = "The cat sat on the mat because"
NUM_TOKENS = 6
BANDWIDTH, RATE = 20.0, 0.25  # GB/s and TFLOP/s of the device in these tests
DEVICE = Roofline(bytes_per_s=BANDWIDTH * 1e9, flops_per_s=RATE * 1e12)
OPTIONS = Options(max_tokens=NUM_TOKENS, temperature=0.8, top_k=40, top_p=0.9, seed=3)


class Recorder:
    """Opens the streams of an engine, and keeps the completions that it gave."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.completions: list[Completion] = []

    def __call__(
        self, prompt: str | Sequence[int], options: Options
    ) -> AbstractContextManager[CompletionStream]:
        stream = self._engine(prompt, options)
        complete = stream.completion

        def completion() -> Completion:
            self.completions.append(complete())
            return self.completions[-1]

        stream.completion = completion
        opened: AbstractContextManager[CompletionStream] = stream
        return opened


def subject_of(model: str, open_stream: Any, dtype: str = "bfloat16") -> Subject:
    return Subject(
        model=model,
        engine="in this process",
        cost=make_cost(read_model_config(model), dtype),
        roofline=DEVICE,
        open_stream=open_stream,
        memory=dict,
        watts=dict,
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, kv_cache_gb=0.1, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def recorder(llm: LLM) -> Recorder:
    return Recorder(llm.stream)


@pytest.fixture(scope="module")
def found(recorder: Recorder) -> Explanation:
    subject = subject_of(DEMO, recorder)
    return explain(subject, PROMPT, OPTIONS, num_candidates=5, recompute=True)


def test_work_and_floors_are_those_of_plan_cost(found: Explanation) -> None:
    args = ["--prompt", str(len(found.prompt_tokens)), "--output", str(len(found.steps))]
    args += ["--bandwidth", str(BANDWIDTH), "--rate", str(RATE), "--json"]
    result = CliRunner().invoke(app, ["plan", "cost", DEMO, *args])
    assert result.exception is None, result.output
    planned = json.loads(result.output)
    shown = json.loads(json.dumps(found.as_json()))["cost"]
    assert planned["floors"][0].pop("device") == "given"
    shown["floors"][0].pop("device")
    assert shown == planned
    first, *decodes = found.steps
    assert (first.flops, first.num_bytes) == tuple(
        planned["prefill"][name] for name in ("flops", "num_bytes")
    )
    for name in ("flops", "num_bytes"):
        assert sum(getattr(step, name) for step in found.steps) == planned["with_cache"][name]
        assert getattr(decodes[0], name) == planned["first_decode"][name]
    assert first.floor_seconds == planned["floors"][0]["ttft_seconds"]
    assert sum(step.floor_seconds for step in found.steps) == pytest.approx(
        planned["floors"][0]["with_cache_seconds"]
    )


def test_times_are_those_of_the_engine(found: Explanation, recorder: Recorder) -> None:
    timeline = recorder.completions[0].timeline
    assert found.timeline["prefill_seconds"] == found.steps[0].seconds == timeline.prefill_seconds
    for name in ("ttft_seconds", "tpot_seconds", "decode_seconds", "end_to_end_seconds"):
        assert found.timeline[name] == getattr(timeline, name) > 0
    assert found.tokens_per_second == NUM_TOKENS / timeline.end_to_end_seconds
    assert all(step.seconds >= 0 for step in found.steps)
    assert sum(step.seconds for step in found.steps[1:]) > 0
    assert found.recomputation is not None
    again = [each.timeline for each in recorder.completions[3:]]
    assert found.recomputation.seconds == tuple(each.end_to_end_seconds for each in again)
    tokens = len(found.prompt_tokens)
    assert [each.prompt_tokens for each in again] == list(range(tokens, tokens + NUM_TOKENS))
    assert not any(each.cached_tokens for each in again)


def test_a_token_without_cache_is_the_same(found: Explanation) -> None:
    assert found.recomputation is not None
    assert (len(found.recomputation.seconds), found.recomputation.num_different) == (NUM_TOKENS, 0)


def test_least_and_penalized_tokens_make_no_false_difference(llm: LLM) -> None:
    """A token computed again is the first one of its request, which has another count."""
    subject = subject_of(DEMO, llm.stream)
    options: Options = {"max_tokens": 4, "seed": 0, "temperature": 0.8}
    least = explain(
        subject, PROMPT, {**options, "min_tokens": 3}, num_candidates=1, recompute=True
    ).recomputation
    assert least is not None
    assert least.num_different == 0
    penalized = explain(
        subject, PROMPT, {**options, "frequency_penalty": 1.5}, num_candidates=1, recompute=True
    )
    assert penalized.recomputation is None
    assert penalized.recomputation_note.startswith("not measured: presence_penalty and freq")


def test_candidates_are_those_of_the_api(found: Explanation, llm: LLM) -> None:
    """Of requests of their own, with the seed of the explained one."""
    (raw,) = llm.generate(PROMPT, Options(**OPTIONS, logprobs=5), progress=False)
    options = Options(**OPTIONS, logprobs=20, processed_logprobs=True)
    (drawn,) = llm.generate(PROMPT, options, progress=False)
    output, after = raw.outputs[0], drawn.outputs[0]
    assert [step.token_id for step in found.steps] == list(output.token_ids)
    assert found.text == output.text
    assert output.logprobs is not None
    assert after.logprobs is not None
    for step, model, kept in zip(found.steps, output.logprobs, after.logprobs, strict=True):
        assert model is not None
        assert kept is not None
        assert len(step.candidates) == 5
        assert step.probability == math.exp(model[step.token_id].logprob)
        assert step.drawn_probability == math.exp(kept[step.token_id].logprob) > 0
        for each in step.candidates:
            assert each.probability == math.exp(model[each.token_id].logprob)
            if each.token_id in kept:
                assert each.drawn_probability == math.exp(kept[each.token_id].logprob)
            else:
                assert each.drawn_probability == 0
        assert [each.probability for each in step.candidates] == sorted(
            (each.probability for each in step.candidates), reverse=True
        )
        # Temperature 0.8 and filters take from the tail and give to the likeliest.
        assert (step.candidates[0].drawn_probability or 0) > step.candidates[0].probability


def test_prompt_and_shapes_are_those_of_the_served_model(found: Explanation) -> None:
    assert "".join(each.text for each in found.prompt_tokens) == PROMPT
    shapes = weight_shapes(read_model_config(DEMO))
    stages = {stage.name.partition(",")[0]: stage for stage in found.stages}
    tokens = len(found.prompt_tokens)
    layer = "model.layers.0."
    for name, weight in (
        ("Q", f"{layer}self_attn.q_proj.weight"),
        ("K and V", f"{layer}self_attn.k_proj.weight"),
        ("MLP", f"{layer}mlp.gate_proj.weight"),
    ):
        assert math.prod(stages[name].prefill) == tokens * shapes[weight][0]
        assert math.prod(stages[name].decode) == shapes[weight][0]
    vocab_size, hidden = shapes["model.embed_tokens.weight"]
    assert stages["embedding"].prefill == (1, tokens, hidden)
    assert stages["logits"].prefill == (1, 1, vocab_size)
    heads = shapes[f"{layer}self_attn.q_proj.weight"][0] // 64
    assert stages["scores Q K^T"].prefill == (1, heads, tokens, tokens)
    assert stages["scores Q K^T"].decode == (1, heads, 1, tokens + 1)


def test_the_page_opens_light_and_dark_without_an_error(found: Explanation, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    hostile = replace(found, prompt="<script>alert(1)</script>", text="<b>&\n")
    write_page(hostile, path)
    colours = set()
    with chromium() as page:
        for theme in ("light", "dark"):
            set_window(page, 1000, theme=theme)
            page.get(path.as_uri())
            assert text(page, "h1") == "<script>alert(1)</script>"
            assert text(page, "#output") == "<b>&\u21b5"
            assert len(page.find_elements("css selector", "details")) == NUM_TOKENS
            assert len(page.find_elements("css selector", "svg .floor")) == NUM_TOKENS - 1
            style = "return getComputedStyle(document.body).backgroundColor"
            colours.add(page.execute_script(style))
            loaded = "return performance.getEntriesByType('resource').length"
            assert page.execute_script(loaded) == 0
            assert problems(page) == []
    assert len(colours) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_command_prints_and_writes_everything(folder: Path, tmp_path: Path) -> None:
    page, args = tmp_path / "page.html", ["explain", "A cache holds", "--model", str(folder)]
    args += ["--dtype", "float32", "--max-tokens", "4", "--ignore-eos", "--device", "h100"]
    result = CliRunner().invoke(app, [*args, "--json", "--html", str(page)])
    assert result.exception is None, result.output
    shown = json.loads(result.output)
    assert [len(shown[name]) for name in ("steps", "stages")] == [4, 9]
    assert shown["recomputation"]["num_different"] == 0
    assert shown["memory"]["process"] > shown["memory"]["kv_cache"]
    assert shown["stopped_because"] == "max_tokens, 4, was reached"
    assert "A cache holds" in page.read_text()
    plain = CliRunner().invoke(app, [*args, "--no-recompute"])
    assert plain.exception is None, plain.output
    for part in (
        "scores Q K^T, each layer",
        "prefill: ",
        "TTFT ",
        "without KV cache: not measured",
    ):
        assert part in plain.output
    assert shown["text"] == json.loads(result.output)["text"]


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["--html", "/no/such/folder/x.html"], "--html"),
        (["--device", "abacus"], "--device"),
        (["--dtype", "int3"], "--dtype"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--url", "http://tandem.example:8080"], "--device"),
        (["--url", "tandem.example:50051"], "--device"),
    ],
)
def test_wrong_options_are_named(args: list[str], option: str) -> None:
    result = CliRunner().invoke(app, ["explain", "x", *args])
    assert isinstance(result.exception, InvalidArgument)
    assert option in str(result.exception)


def test_the_name_of_a_served_model_is_not_taken_for_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServiceAccess, "status", lambda access: ("", {"model": folder.name}))
    monkeypatch.chdir(folder.parent)
    args = ["--url", "grpc://127.0.0.1:1", "--device", "h100"]
    result = CliRunner().invoke(app, ["explain", "x", *args])
    with pytest.raises(InvalidArgument, match=r"^--model: must be the path .* 'tiny'$"):
        raise result.exception or AssertionError


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "[::1]:1", "LOCALHOST:1,b:1", "http://127.0.0.1:1/v1"]
)
def test_a_service_of_this_machine_needs_no_device(url: str) -> None:
    """With or without the scheme, which other commands do not need either."""
    result = CliRunner().invoke(app, ["explain", "x", "--url", url])
    assert isinstance(result.exception, Unavailable)  # nothing listens there


async def test_a_service_with_two_pools_is_explained(folder: Path) -> None:
    """Over gRPC; its prefix cache leaves nothing to recompute once the prompt has a block."""
    served = ServedModel(name="tiny", tokenizer=Tokenizer.load(folder), context_tokens=2048)
    async with split_fleet(folder, {"prefill": [1], "decode": [1]}) as fleet:
        server = await ApiServers.start(GenerationService([served], fleet.dispatcher))

        def ask(prompt: str, options: Options) -> Explanation:
            with Client(server.grpc_address) as client:
                subject = subject_of(
                    str(folder), lambda prompt, given: client.stream(prompt, **given), "float32"
                )
                return explain(subject, prompt, options, num_candidates=3, recompute=True)

        try:
            greedy = Options(max_tokens=5, temperature=0.0, seed=0, ignore_eos=True)
            found = await asyncio.to_thread(ask, "What is the capital of France? " * 9, greedy)
            stop = found.text[1:]
            stopped = await asyncio.to_thread(ask, found.prompt, Options(**greedy, stop=[stop]))
            args = ["--url", f"grpc://{server.grpc_address}", "--model", str(folder)]
            args += ["--dtype", "float32", "--device", "h100", "--max-tokens", "3"]
            by_path = await asyncio.to_thread(CliRunner().invoke, app, ["explain", "x", *args])
        finally:
            await server.stop(0)
    assert by_path.exception is None, by_path.output
    assert found.timeline["prefill_worker"] != found.timeline["decode_worker"]
    assert [step.drawn_probability for step in found.steps] == [1.0] * 5
    for step in found.steps:
        others = [each for each in step.candidates if each.token_id != step.token_id]
        assert [each.drawn_probability for each in others] == [0.0] * len(others)
    assert found.recomputation is None
    assert "reuses the KV cache" in found.recomputation_note
    assert stopped.finish_reason == "stop"
    assert repr(stop) in stopped.stopped_because
    assert "reuses the KV cache" in render_page(found)
