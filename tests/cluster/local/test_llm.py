"""`tandem.LLM`: the service's tokens and transformers', in the caller's process, with nothing left
behind.
"""

import asyncio
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem import LLM, LoRARequest, RequestOutput, SamplingParams
from tandem.cluster.local import engine
from tandem.cluster.local.llm import LocalStream, _answer, _read_prompt
from tandem.proto import inference_pb2
from tandem.proto.errors import InternalError, InvalidArgument, NotFound, Unavailable
from tandem.router import adapters
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient
from tandem.router.client.request import text_prompt
from tandem.router.client.types import Choice, Message, Options
from tandem.router.frontend.prepared import PreparedRequest
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.router.watermark.config import WatermarkConfig
from tandem.router.watermark.key import write_watermark_key
from tandem.router.watermark.rules import WatermarkRules
from tandem.tests.adapters import make_adapter, peft_reference
from tandem.tests.fleet import is_idle, split_fleet
from tandem.tests.imported import imported
from tandem.tests.service import expected_tokens
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.tiny_multimodal import make_tiny_multimodal
from tandem.tests.waits import WAIT
from tandem.tests.workers.model.helpers import reference_greedy

NUM_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "A cache holds",
    "What is the capital of France? " * 20,
    "dog",
    "no",
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.02, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def watermark_key(folder: Path) -> Path:
    """The file with a key that belongs to the model in `folder`."""
    file = folder.parent / "watermark.key"
    if not file.exists():
        write_watermark_key(file)
    return file


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=8, watermark_key=watermark_key(folder), **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(running: LLM) -> Iterator[LLM]:
    """After each test nothing is held, and no block is lost."""
    yield running
    wait_idle(running)


def wait_idle(llm: LLM) -> None:
    deadline = time.monotonic() + WAIT
    while not is_idle(status := llm._loop.run(llm._engine.status())):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    assert status.integrity_ok


def wait_until_running(llm: LLM) -> None:
    """Waits, in a thread of its own, until a sequence runs; for WAIT at most."""
    deadline = time.monotonic() + WAIT
    while not llm._loop.run(llm._engine.status()).info.load.num_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def num_submitted(llm: LLM) -> int:
    """Of sequences, since it was made."""
    return llm._engine._worker._requests._next_id


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_equals_transformers_together_alone_and_from_the_prefix_cache(
    llm: LLM, folder: Path
) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in together] == PROMPTS
    assert ids_of(together) == expected_tokens(
        folder, [each.prompt_token_ids for each in together], NUM_TOKENS
    )
    assert [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS] == ids_of(
        together
    )
    again = llm.generate(
        prompt_token_ids=[each.prompt_token_ids for each in together], sampling_params=GREEDY
    )
    assert ids_of(again) == ids_of(together)
    assert again[2].num_cached_tokens > 0
    assert {each.outputs[0].finish_reason for each in again} == {"length"}
    tokenizer = Tokenizer.load(folder)
    assert [each.outputs[0].text for each in again] == [
        tokenizer.decode(ids) for ids in ids_of(again)
    ]


def test_what_parameters_leave_out_is_as_generation_config_says(
    folder: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    (copied / "generation_config.json").write_text(
        json.dumps({"temperature": 0.0, "max_new_tokens": 5})
    )
    with LLM(str(copied), max_num_seqs=4, **SMALL) as llm:
        assert llm.get_default_sampling_params() == Options(temperature=0.0, max_tokens=5)
        (short,) = llm.generate(PROMPTS[0], Options(ignore_eos=True))
        (long,) = llm.generate(PROMPTS[0], Options(max_tokens=NUM_TOKENS, ignore_eos=True))
        (sampled,) = llm.generate(
            PROMPTS[0], Options(max_tokens=NUM_TOKENS, temperature=2.0, seed=1)
        )
    assert ids_of([long]) == expected_tokens(folder, [long.prompt_token_ids], NUM_TOKENS)
    assert ids_of([short]) == [long.outputs[0].token_ids[:5]]
    assert ids_of([sampled]) != ids_of([long])


def test_a_model_that_keeps_states_generates_with_as_many_as_are_set(tmp_path: Path) -> None:
    """Three choices take two states each; the prompt's state is shared until they fork."""
    folder = make_tiny_decoder(tmp_path, "lfm2")
    prompt = [numbers + 3 for numbers in range(40)]
    (expected,) = expected_tokens(folder, [prompt], 8)
    with LLM(str(folder), dtype="float32", kv_cache_gb=0.01, state_slots=7) as llm:
        info = llm._loop.run(llm._engine.status()).info
        assert info.num_states == 7
        params = SamplingParams(temperature=0, max_tokens=8, n=3, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
        assert [list(each.token_ids) for each in output.outputs] == [expected] * 3
        with pytest.raises(
            InvalidArgument, match="n: has 4 sequences; the maximum of a worker is 3"
        ):
            llm.generate("dog", SamplingParams(max_tokens=8, n=4))
        wait_idle(llm)


def test_prompts_of_every_form(llm: LLM) -> None:
    (text,) = llm.generate("dog", GREEDY)
    ids = text.prompt_token_ids
    both = {"prompt": "", "prompt_token_ids": ids}
    forms: list[Any] = [{"prompt": "dog"}, {"prompt_token_ids": ids}, both]
    assert ids_of(llm.generate(forms, GREEDY)) == [text.outputs[0].token_ids] * 3
    # Only models that begin a text with a special token generate from the empty text.
    assert _read_prompt({"prompt": ""}) == _read_prompt("")
    (alone,) = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY)
    assert (alone.prompt, alone.outputs[0].token_ids) == (None, text.outputs[0].token_ids)
    assert llm.generate([], GREEDY) == []


@asynccontextmanager
async def service_client(folder: Path) -> AsyncIterator[AsyncClient]:
    """A client of a service with a prefill and a decode worker."""
    served = ServedModel(
        name="tiny",
        tokenizer=Tokenizer.load(folder),
        context_tokens=2048,
        watermark=WatermarkRules.load(WatermarkConfig(key_file=str(watermark_key(folder)))),
    )
    async with split_fleet(folder, {"prefill": [1], "decode": [1]}) as fleet:
        server = await ApiServers.start(GenerationService([served], fleet.dispatcher))
        try:
            async with AsyncClient(server.grpc_address) as client:
                yield client
        finally:
            await server.stop(0)


WAYS: list[Options] = [
    Options(seed=3, temperature=1.3, top_p=0.9),
    Options(seed=4, n=3, logprobs=2),
    Options(seed=5, n=2, best_of=4, repetition_penalty=1.2),
    Options(beam_width=3, n=2),
    Options(seed=6, top_k=20, logit_bias={7: 5.0}, presence_penalty=0.5, bad_words=["the"]),
    Options(temperature=0, stop=["e"], logprobs=1, prompt_logprobs=1),
    Options(seed=9, temperature=1.5, n=2, stop_regex=r"[aeiou][a-z]|\d+ "),
    Options(temperature=0, logit_bias={7: 100.0}, repetition_stop_ngram=2, repetition_stop_count=3),
    Options(
        seed=7,
        json_schema={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    ),
    Options(seed=8, choice=["Paris", "Rome"]),
    Options(seed=9, n=3, watermark=True, logprobs=1),
    Options(max_tokens=0, prompt_logprobs=2),
]


async def test_every_way_to_sample_equals_the_service(llm: LLM, folder: Path) -> None:
    common = Options(max_tokens=NUM_TOKENS)
    ways: list[Options] = [{**common, **way} for way in WAYS]
    found = llm.generate([PROMPTS[0]] * len(ways), ways)
    async with service_client(folder) as client:
        for way, output in zip(ways, found, strict=True):
            expected = await client.generate(PROMPTS[0], **way)
            assert [
                (each.text, tuple(each.token_ids), each.finish_reason) for each in output.outputs
            ] == [
                (choice.text, choice.token_ids, choice.finish_reason) for choice in expected.choices
            ]
            for one, choice in zip(output.outputs, expected.choices, strict=True):
                assert_same_logprobs(one.logprobs, choice, asked="logprobs" in way)
                assert one.score == pytest.approx(choice.score, abs=1e-4)
            if "prompt_logprobs" in way:
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_rules_say_why_a_completion_has_ended(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], Options(temperature=0, max_tokens=NUM_TOKENS))[0].outputs[0]
    common = Options(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    token = whole.token_ids[4]
    ways: list[Options] = [
        {**common, "stop_token_ids": [token]},
        {**common, "logit_bias": {7: 100.0}, "repetition_stop_ngram": 2}
        | Options(repetition_stop_count=3),
        {**common, "max_time_ms": 1},
    ]
    named, repeated, cut = (
        output.outputs[0] for output in llm.generate([PROMPTS[0]] * len(ways), ways)
    )
    assert (named.finish_reason, named.stop_reason) == ("stop", token)
    assert (repeated.finish_reason, repeated.token_ids) == ("repetition", [7] * 6)
    assert cut.finish_reason == "time"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_the_time_of_a_request_does_not_begin_before_it_starts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, hour = llm._engine.prepare, 3600

    async def prepare_for_an_hour(request: inference_pb2.GenerateRequest) -> PreparedRequest:
        """As if many long prompts were prepared after this one."""
        prepared = await prepare(request)
        tokens = prepared.tokens
        assert tokens.ends_at is not None
        tokens = replace(tokens, arrived=tokens.arrived - hour, ends_at=tokens.ends_at - hour)
        return replace(prepared, tokens=tokens)

    monkeypatch.setattr(llm._engine, "prepare", prepare_for_an_hour)
    timed: Options = {**GREEDY, "max_time_ms": int(1000 * WAIT)}
    (output,) = llm.generate("dog", timed)
    assert output.outputs[0].finish_reason == "length"
    with llm.stream("dog", timed) as stream:
        assert stream.completion().finish_reason == "length"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_guessed_tokens_change_no_answer(llm: LLM, folder: Path, method: str) -> None:
    """Nor what stop strings, choices, log probabilities and grammars make of them."""
    ways: list[Options] = [{**Options(max_tokens=60), **way} for way in WAYS]
    expected = llm.generate([PROMPTS[2]] * len(ways), ways)
    config: dict[str, Any] = {"method": method, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    if method == "draft_model":
        config = {"method": method, "model": str(folder), "num_speculative_tokens": 4}
    with LLM(
        str(folder),
        max_num_seqs=8,
        speculative_config=config,
        watermark_key=watermark_key(folder),
        **SMALL,
    ) as guessing:
        found = guessing.generate([PROMPTS[2]] * len(ways), ways)
        wait_idle(guessing)
        assert guessing._loop.run(guessing._engine.status()).num_accepted_tokens > 0
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.text, one.token_ids, one.finish_reason) == (
                other.text,
                other.token_ids,
                other.finish_reason,
            )
            assert values_of(one.logprobs) == pytest.approx(values_of(other.logprobs), abs=1e-4)


def values_of(logprobs: Any) -> list[float]:
    return [each.logprob for by_token in logprobs or () for _, each in sorted(by_token.items())]


def assert_same_logprobs(found: Any, expected: Choice, *, asked: bool) -> None:
    if not asked:
        assert found is None
        return
    assert len(found) == len(expected.logprobs)
    for by_token, scores in zip(found, expected.logprobs, strict=True):
        alternatives = {each.token_id: each.logprob for each in (*scores.top, scores.token)}
        assert {token: each.logprob for token, each in by_token.items()} == pytest.approx(
            alternatives, abs=1e-4
        )
        for place, each in enumerate(scores.top, start=1):
            rank = by_token[each.token_id].rank
            assert rank == place or (
                each.token_id == scores.token.token_id and rank < place
            )  # of equals the first
        assert by_token[scores.token.token_id].rank >= 1


async def test_a_chat_equals_the_service(llm: LLM, folder: Path) -> None:
    chats = [
        [{"role": "user", "content": text}] for text in ("What is the capital of France?", "dog")
    ]
    found = llm.chat(chats, GREEDY)
    (alone,) = llm.chat(chats[0], GREEDY)
    assert alone.outputs == found[0].outputs
    async with service_client(folder) as client:
        expected = [await client.chat(chat, **GREEDY) for chat in chats]
    assert [each.outputs[0].text for each in found] == [each.text for each in expected]
    with llm.stream_chat(chats[0], GREEDY) as stream:
        assert stream.completion().text == expected[0].text


def test_a_chat_template_replaces_that_of_the_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text("[{{ messages[0].role }}] {{ messages[0].content | upper }}")
    with LLM(str(folder), chat_template=file, **SMALL) as llm:
        (found,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
        (expected,) = llm.generate("[user] HI", GREEDY)
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_chat_takes_the_arguments_of_vllm(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    vllm: dict[str, Any] = {"use_tqdm": False, "chat_template_kwargs": {"mood": "!"}}
    with LLM(str(folder), chat_template=file, **SMALL) as llm:
        (found,) = llm.chat(chat, GREEDY, **vllm)
        (ours,) = llm.chat(chat, GREEDY, template_kwargs={"mood": "!"}, add_generation_prompt=True)
        (expected,) = llm.generate("ab!", GREEDY, use_tqdm=False)
        (continued,) = llm.chat(
            chat, GREEDY, continue_final_message=True, add_generation_prompt=False
        )
        (shorter,) = llm.generate("ab", GREEDY)
        with pytest.raises(InvalidArgument, match="add_generation_prompt: must be False if"):
            llm.chat(chat, GREEDY, add_generation_prompt=False)
        with pytest.raises(InvalidArgument, match="chat_template_kwargs: is another name"):
            llm.chat(chat, GREEDY, template_kwargs={}, **vllm)
    assert found.prompt_token_ids == ours.prompt_token_ids == expected.prompt_token_ids
    assert continued.prompt_token_ids == shorter.prompt_token_ids


def test_arguments_are_defaults_of_parameters_and_of_the_template(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mood.jinja"
    file.write_text("{{ messages[0].content }}{{ mood }}")
    said: list[Message] = [{"role": "user", "content": "a"}]
    with LLM(
        str(folder),
        chat_template=file,
        generation_config="none",
        override_generation_config={"temperature": 0.0, "max_tokens": 5},
        default_chat_template_kwargs={"mood": "!"},
        **SMALL,
    ) as llm:
        assert llm.get_default_sampling_params() == Options(temperature=0.0, max_tokens=5)
        (found,) = llm.chat(said, Options(ignore_eos=True))
        (own,) = llm.chat(said, GREEDY, chat_template_kwargs={"mood": "?"})
        expected = llm.generate(["a!", "a?"], GREEDY)
    given = [found.prompt_token_ids, own.prompt_token_ids]
    assert given == [each.prompt_token_ids for each in expected]
    assert found.outputs[0].token_ids == expected[0].outputs[0].token_ids[:5]


def test_an_image_is_refused_by_the_name_of_the_architecture(tmp_path: Path) -> None:
    folder = make_tiny_multimodal(tmp_path, "gemma3")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with LLM(str(folder), max_num_seqs=4, **SMALL) as llm:
        with pytest.raises(InvalidArgument) as caught:
            llm.chat([message], GREEDY)
        assert caught.value.message == (
            "messages[0]: parts of type 'image_url' are not supported; this service has the text "
            "model of Gemma3ForConditionalGeneration only"
        )
        assert num_submitted(llm) == 0


def test_a_stream_has_the_same_tokens_and_can_be_left(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    with llm.stream(PROMPTS[0], GREEDY) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [token for delta in deltas for token in delta.token_ids] == whole.outputs[0].token_ids
    assert stream.completion().usage.completion_tokens == NUM_TOKENS
    with llm.stream(PROMPTS[0], SamplingParams(max_tokens=1500, ignore_eos=True)) as stream:
        next(stream)
    wait_idle(llm)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda llm: llm.generate(["a", "b" * 9000], GREEDY), "prompts[1]: "),
        (lambda llm: llm.generate(["a", 3], GREEDY), "prompts[1]: "),
        (
            lambda llm: llm.generate(["a", {"text": "b"}], GREEDY),
            "prompts[1]: needs prompt or prompt_token_ids",
        ),
        (
            lambda llm: llm.generate(prompt_token_ids=[[3], [4], []], sampling_params=GREEDY),
            "prompt_token_ids[2]: ",
        ),
        (
            lambda llm: llm.generate(prompt_token_ids=[[3], [4096]], sampling_params=GREEDY),
            "prompt_token_ids[1]: ",
        ),
        (
            lambda llm: llm.generate(["a", "b"], [{}, {"temperature": 9}]),
            "prompts[1], sampling.temperature: must be",
        ),
        (
            lambda llm: llm.generate(["a", "b"], [GREEDY]),
            "sampling_params: has 1 entries; it must have one for each of 2 prompts",
        ),
        (
            lambda llm: llm.generate(["a"], {"temprature": 1}),
            "prompts[0], temprature: there is no such option",
        ),
        (lambda llm: llm.generate(), "prompts: give either"),
        (lambda llm: llm.chat([[{"role": "user", "content": "a"}], []]), "messages[1]"),
        (
            lambda llm: llm.generate("a", {"prompt_logprobs": 99}),
            "prompts[0], prompt_logprobs: must be",
        ),
        (lambda llm: llm.stream("b" * 9000, GREEDY), "prompt: "),
        (
            lambda llm: llm.stream_chat([{"role": "user", "content": "b" * 9000}], GREEDY),
            "messages: ",
        ),
        (lambda llm: llm.stream("a", {"top_p": 0.0}), "sampling.top_p: must be"),
    ],
)
def test_a_wrong_prompt_is_named_before_anything_runs(
    llm: LLM, call: Callable[[LLM], object], named: str
) -> None:
    before = num_submitted(llm)
    with pytest.raises(InvalidArgument) as caught:
        call(llm)
    assert type(caught.value) is InvalidArgument
    assert str(caught.value).startswith(named), str(caught.value)
    assert num_submitted(llm) == before


async def test_others_go_on_while_many_prompts_are_prepared() -> None:
    order = list[str]()

    class Engine:
        max_sequences = 1

        async def prepare(self, _request: inference_pb2.GenerateRequest) -> None:
            order.append("prepare")

        async def complete(self, _request: None) -> None:
            pass

    async def do_other_work() -> None:
        while len(order) < 6:
            order.append("other")
            await asyncio.sleep(0)

    prompts = [text_prompt("a")] * 3
    engine: Any = Engine()
    answering = _answer(engine, "prompts", prompts, [Options()] * 3, lambda: None)
    await asyncio.gather(answering, do_other_work())
    assert order == ["prepare", "other"] * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be greater than or equal to 1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: "),
        ({"dtype": "int3"}, "dtype: must be"),
        ({"quantization": "awq"}, "quantization: "),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype: must be 'auto', 'int8', 'fp8' or 'int4'"),
        (
            {"quantization": "int8", "device": "cuda"},
            "quantization: int8 has kernels on cpu only; on cuda use fp8 or int4, or serve",
        ),
        ({"max_num_seqs": "8"}, "max_num_seqs: must be"),
        (
            {"speculative_config": {"method": "eagle"}},
            "speculative_config.method: must be 'ngram' or 'draft_model'",
        ),
        (
            {"speculative_config": {"method": "draft_model"}},
            "speculative_config.model: must be set if and only if method is draft_model",
        ),
        (
            {"speculative_config": {"model": "x", "method": "ngram"}},
            "speculative_config.model: must be set if and only if method is",
        ),
        (
            {"speculative_config": {"model": "no model"}},
            "speculative_config.model: 'no model' is not a built-in model",
        ),
        ({"kv_cache_gb": 1e9}, "kv_cache_gb: must be"),
        ({"kv_host_gb": -1.0}, "kv_host_gb: must be"),
        ({"kv_disk": "/x"}, "kv_disk: must be set together with kv_disk_gb above 0"),
        ({"kv_host_gb": 1.0, "enable_prefix_caching": False}, "kv_host_gb: needs prefix_caching"),
        ({"chat_template": "/x.jinja"}, "chat_template: /x.jinja: No such file or directory"),
        ({"chat_template": "{{ x"}, "chat_template: is not valid Jinja in line 1 (unexpected"),
    ],
)
def test_a_wrong_argument_is_named(folder: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        LLM(str(folder), **arguments)
    assert str(caught.value).startswith(words), str(caught.value)


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound, match=r"there is no folder \./nothing"):
        LLM("./nothing")


def test_perplexity_equals_transformers(llm: LLM, folder: Path) -> None:
    texts = [PROMPTS[2], PROMPTS[0]]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = llm.perplexity(texts)
    for text, perplexity in zip(texts, found, strict=True):
        ids = torch.tensor([llm.generate(text, GREEDY)[0].prompt_token_ids])
        with torch.no_grad():
            assert perplexity == pytest.approx(
                math.exp(model(ids, labels=ids).loss.item()), rel=1e-3
            )


def test_an_interrupt_frees_everything_and_the_next_call_runs(llm: LLM) -> None:
    def interrupt() -> None:
        wait_until_running(llm)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 8, SamplingParams(max_tokens=1500, ignore_eos=True))
    thread.join(WAIT)
    wait_idle(llm)
    assert len(llm.generate("dog", GREEDY)[0].outputs[0].token_ids) == NUM_TOKENS


def test_more_prompts_than_blocks_for_them_end_with_the_same_tokens(llm: LLM, folder: Path) -> None:
    expected = ids_of(
        llm.generate(PROMPTS * 2, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
    )
    with LLM(
        str(folder), max_num_seqs=8, max_model_len=600, **SMALL | {"kv_cache_gb": 0.001}
    ) as small:
        assert small._loop.run(small._engine.status()).info.load.total_blocks < 8 * 300 // 16
        found = small.generate(
            PROMPTS * 2, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        )
        wait_idle(small)
    assert ids_of(found) == expected


def test_what_leaves_the_cache_comes_back_from_host_memory(llm: LLM, folder: Path) -> None:
    prompts, once = (
        [f"{number} {'dog ' * 300}" for number in range(16)],
        SamplingParams(temperature=0, max_tokens=4),
    )
    expected = [ids_of(llm.generate(prompt, once)) for prompt in prompts]
    with LLM(
        str(folder),
        max_num_seqs=2,
        max_model_len=400,
        **SMALL | {"kv_cache_gb": 0.001},
        kv_host_gb=0.01,
    ) as small:
        for _ in range(2):
            assert [ids_of(small.generate(prompt, once)) for prompt in prompts] == expected
        wait_idle(small)
        status = small._loop.run(small._engine.status())
    num_blocks = sum(
        len(llm.generate(prompt, once)[0].prompt_token_ids) // 16 for prompt in prompts
    )
    assert status.info.load.total_blocks < num_blocks
    assert status.num_restored_tokens > 16 * 16


def test_what_was_computed_comes_back_from_disk_after_a_restart(
    llm: LLM, folder: Path, tmp_path: Path
) -> None:
    prompts, once = (
        [f"{number} {'cat ' * 150}" for number in range(4)],
        SamplingParams(temperature=0, max_tokens=4),
    )
    expected = [ids_of(llm.generate(prompt, once)) for prompt in prompts]
    disk: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gb": 0.01}
    num_restored = []
    for _ in range(2):
        with LLM(str(folder), max_num_seqs=2, max_model_len=400, **SMALL, **disk) as one:
            assert [ids_of(one.generate(prompt, once)) for prompt in prompts] == expected
            wait_idle(one)
            num_restored.append(one._loop.run(one._engine.status()).num_restored_tokens)
    assert num_restored[0] == 0
    assert num_restored[1] > 4 * 16


def test_a_disk_that_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"kv_disk: .*file"):
        LLM(str(folder), **SMALL, kv_disk=str(tmp_path / "file"), kv_disk_gb=1.0)


def test_ranks_are_processes_that_end_with_it(folder: Path, llm: LLM) -> None:
    before = set(psutil.Process().children(recursive=True))
    with LLM(str(folder), tensor_parallel_size=2, **SMALL) as split:
        ranks = set(psutil.Process().children(recursive=True)) - before
        assert len(ranks) == 1
        assert ids_of(split.generate(PROMPTS, GREEDY)) == ids_of(llm.generate(PROMPTS, GREEDY))
        wait_idle(split)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks)


def test_a_lost_rank_ends_the_call_and_says_so(folder: Path, llm: LLM) -> None:
    before = set(psutil.Process().children(recursive=True))
    with LLM(str(folder), tensor_parallel_size=2, **SMALL) as split:
        (rank,) = set(psutil.Process().children(recursive=True)) - before

        def kill() -> None:
            wait_until_running(split)
            rank.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(InternalError, match="the engine has failed"):
            split.generate(PROMPTS, SamplingParams(max_tokens=1900, ignore_eos=True))
        thread.join(WAIT)
        with pytest.raises(InternalError, match="the engine has failed"):
            split.generate("dog", GREEDY)


HANGING = """
import threading

import psutil
from tandem import LLM, SamplingParams
from tandem.cluster.local import engine
from tandem.proto.errors import InternalError
from tandem.workers.tp.process_group import TpExecutor

engine._STEP_SECONDS["cpu"] = 1.0
launch, num_steps = TpExecutor.launch, 0

def launch_or_hang(self, plan, on_layers=None):
    '''The fifth step waits for ever for a rank that has died, as a captured one does.'''
    global num_steps
    num_steps += bool(plan.sequences)
    if num_steps == 5:
        for rank in psutil.Process().children():
            rank.kill()
        threading.Event().wait()
    return launch(self, plan, on_layers)

TpExecutor.launch = launch_or_hang
with LLM({folder!r}, dtype="float32", kv_cache_gb=0.02, tensor_parallel_size=2) as llm:
    try:
        llm.generate("dog", SamplingParams(max_tokens=100, ignore_eos=True))
    except InternalError as error:
        print(error)
print("closed")
"""


def test_a_process_whose_step_waits_for_a_lost_rank_for_ever_exits(folder: Path) -> None:
    """After the call has failed, and before `close` gives up."""
    code = HANGING.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "the engine has failed; make a new one\n")
    assert "has not ended within 1 seconds; this process exits with status 1" in done.stderr


def test_what_is_closed_is_gone_and_says_so(folder: Path) -> None:
    closed = LLM(str(folder), **SMALL)
    stream = closed.stream("dog", GREEDY)
    next(stream)
    engine = weakref.ref(closed._engine)
    threads = {each.name for each in threading.enumerate()}
    assert {"tandem-llm", "tandem-engine"} <= threads
    del stream
    closed.close()
    closed.close()
    assert engine() is None
    for call in (lambda: closed.generate("dog"), lambda: closed.stream("dog")):
        with pytest.raises(Unavailable, match="the engine is closed"):
            call()


def test_a_stream_of_a_closed_llm_can_be_left(folder: Path) -> None:
    """The exception of the block stays as it is."""
    closed = LLM(str(folder), **SMALL)
    stream = closed.stream("dog", GREEDY)
    next(stream)
    closed.close()
    with pytest.raises(KeyError), stream:
        raise KeyError
    stream.close()


def test_an_llm_that_its_own_thread_collects_ends(folder: Path) -> None:
    lost: Any = LLM(str(folder), **SMALL)
    lost.itself = lost
    loop = lost._loop
    gc.disable()  # nothing but the loop's thread shall collect it
    try:
        del lost

        async def collect() -> None:
            gc.collect()

        loop.run(collect())
    finally:
        gc.enable()
    loop._thread.join(WAIT)
    assert not loop._thread.is_alive()


def test_a_stream_outlives_the_name_of_its_llm(folder: Path) -> None:
    def begin() -> LocalStream:
        return LLM(str(folder), **SMALL).stream("dog", GREEDY)

    assert begin().completion().usage.completion_tokens == NUM_TOKENS


SCRIPT = """
from tandem import LLM, SamplingParams
llm = LLM({folder!r}, dtype="float32", kv_cache_gb=0.02)
params = SamplingParams(temperature=0, max_tokens=8)
for output in llm.generate(["The capital of France is", "A cache holds"], params):
    print(repr(output.outputs[0].text))
"""
PORTS = """
import psutil
print([each.laddr for each in psutil.Process().net_connections("inet")])
"""


def run_script(script: str, folder: Path) -> str:
    code = script.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_script_of_six_lines_opens_no_port_closes_nothing_and_ends_in_order(
    llm: LLM, folder: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [repr(each.outputs[0].text) for each in llm.generate(PROMPTS[:2], params)]
    assert run_script(SCRIPT + PORTS, folder).splitlines() == [*expected, "[]"]


@pytest.mark.parametrize(
    "code", ["import tandem", "from tandem import LLM, SamplingParams, RequestOutput"]
)
def test_the_import_is_light(code: str) -> None:
    assert not {"ray", "torch", "transformers"} & imported(code)


def test_a_lora_request_has_the_tokens_of_peft(llm: LLM, folder: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "adapter", folder)
    request = LoRARequest("sql", 1, str(path))
    ids = [(7 * n) % 400 + 3 for n in range(40)]
    plain = (
        llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, progress=False)[0]
        .outputs[0]
        .token_ids
    )
    for _ in range(2):
        (output,) = llm.generate(
            prompt_token_ids=ids, sampling_params=GREEDY, progress=False, lora_request=request
        )
        assert output.outputs[0].token_ids == reference_greedy(
            peft_reference(folder, {"sql": path}), ids, NUM_TOKENS
        )
        assert output.outputs[0].token_ids != plain
    for wrong in (
        LoRARequest("gone", 2, str(tmp_path / "gone")),
        LoRARequest(folder.name, 3, str(path)),
    ):
        with pytest.raises(InvalidArgument, match="lora_request: "):
            llm.chat(
                [{"role": "user", "content": "hi"}], GREEDY, lora_request=wrong, progress=False
            )


def test_an_adapter_that_was_trained_again_is_read_again(
    llm: LLM, folder: Path, tmp_path: Path
) -> None:
    ids = [(7 * n) % 400 + 3 for n in range(40)]
    for seed in (1, 2):
        path = make_adapter(tmp_path / "adapter", folder, seed=seed)
        (output,) = llm.generate(
            prompt_token_ids=ids,
            sampling_params=GREEDY,
            progress=False,
            lora_request=LoRARequest("again", 1, str(path)),
        )
        expected = reference_greedy(peft_reference(folder, {"again": path}), ids, NUM_TOKENS)
        assert output.outputs[0].token_ids == expected


def test_the_least_recently_used_adapter_makes_room(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list(llm._engine._adapter_states)
    for module in (adapters, engine):
        monkeypatch.setattr(module, "MAX_ADAPTERS", len(known) + 2)
    path = make_adapter(tmp_path / "adapter", folder)
    used = llm._engine._adapters

    def use(name: str) -> None:
        llm._loop.run(llm._engine.use_adapter(LoRARequest(name, 1, str(path))))

    for name in ("a", "b", "a", *known, "c"):
        use(name)
    assert used.get("a") is not None
    assert used.get("b") is None
    use("b")
    assert used.get("a") is None
    assert used.get("b") is not None
