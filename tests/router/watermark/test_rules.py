"""Who gets a watermark, and what is refused; the key and its file."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.proto.errors import InvalidArgument
from tandem.router.auth.authenticator import Caller
from tandem.router.frontend.prepare import RequestContext, prepare
from tandem.router.frontend.served_model import ServedModel
from tandem.router.resume.tokens import ResumeKey
from tandem.router.watermark.config import WatermarkConfig
from tandem.router.watermark.key import KEY_PREFIX, read_watermark_key, write_watermark_key
from tandem.router.watermark.rules import WatermarkRules
from tandem.tests.router.fake_source import byte_tokenizer
from tandem.tests.watermarks import MESSAGE, RULES

FORCED = replace(RULES, tenants=frozenset({"ada"}))
FOR_ALL = replace(RULES, tenants=frozenset({"*"}))
MARKED: dict[str, Any] = {"sampling": {"watermark": True}}


def context(tenant: str = "") -> RequestContext:
    return RequestContext(arrived=1.0, caller=Caller(tenant=tenant), is_resumable=True)


async def submit(
    rules: WatermarkRules | None = RULES,
    tenant: str = "",
    defaults: dict[str, float] | None = None,
    **fields: Any,
) -> worker_pb2.Submit:
    model = ServedModel(
        name="tiny",
        tokenizer=byte_tokenizer(),
        context_tokens=64,
        defaults=defaults or {},
        watermark=rules,
    )
    request = inference_pb2.GenerateRequest(prompt={"text": "hi"}, **fields)
    return (await prepare(request, model, context(tenant))).tokens.submit


async def refused(**fields: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        await submit(**fields)
    return caught.value


async def test_only_who_asks_for_it_or_must_have_it_gets_it() -> None:
    for rules, tenant, fields, expected in (
        (RULES, "", {}, False),
        (RULES, "ada", {"sampling": {"watermark": False}}, False),
        (RULES, "", MARKED, True),
        (FORCED, "ada", {}, True),
        (FORCED, "ada", {"sampling": {"watermark": False}}, True),
        (FORCED, "bob", {}, False),
        (FORCED, "", {}, False),
        (FOR_ALL, "", {}, True),
        (FOR_ALL, "bob", {}, True),
        (None, "ada", {}, False),
    ):
        made = await submit(rules, tenant, **fields)
        assert made.HasField("watermark") == expected
        assert not made.sampling.watermark
        assert made.watermark == (MESSAGE if expected else worker_pb2.Watermark())


async def test_without_a_watermark_the_message_to_workers_is_as_ever() -> None:
    fields: dict[str, Any] = {"sampling": {"seed": 5, "temperature": 0.5}, "request_id": "a"}
    with_key = await submit(RULES, **fields)
    without = await submit(None, **fields)
    with_key.request_id = without.request_id = ""
    assert with_key == without


async def test_greedy_sampling_is_refused_with_the_reason() -> None:
    for temperature in (0.0, 1e-6):
        sampling = {"temperature": temperature}
        error = await refused(sampling=sampling | {"watermark": True})
        assert error.field == "sampling.watermark"
        assert "the watermark needs a temperature above 0: greedy sampling" in error.message
        error = await refused(rules=FORCED, tenant="ada", sampling=sampling)
        assert error.field == "sampling.temperature"
        assert "the watermark of all your completions needs a temperature" in error.message
        assert not (await submit(FORCED, "bob", sampling=sampling)).HasField("watermark")
    # The default of the model counts as well.
    error = await refused(defaults={"sampling.temperature": 0.0}, **MARKED)
    assert error.field == "sampling.watermark"
    made = await submit(defaults={"sampling.temperature": 0.7}, **MARKED)
    assert made.HasField("watermark")


async def test_a_beam_search_is_refused_with_the_reason() -> None:
    error = await refused(beam_search={"width": 2}, **MARKED)
    assert "not allowed with beam_search" in error.message
    error = await refused(rules=FOR_ALL, beam_search={"width": 2})
    assert error.field == "beam_search"
    assert "the watermark of all your completions excludes a beam search" in error.message


async def test_log_probabilities_do_not_show_the_green_tokens() -> None:
    assert (await submit(logprobs=2, **MARKED)).HasField("watermark")
    for rules, fields in ((RULES, MARKED), (FOR_ALL, {})):
        error = await refused(rules=rules, logprobs=2, processed_logprobs=True, **fields)
        assert error.field == "processed_logprobs"
        assert "show which tokens are green" in error.message


async def test_without_a_key_it_is_refused_with_the_reason() -> None:
    error = await refused(rules=None, **MARKED)
    assert (error.field, "has no key" in error.message) == ("sampling.watermark", True)


async def test_what_generates_nothing_needs_no_watermark() -> None:
    """Embeddings and log probabilities of prompts, also where a watermark is demanded."""
    greedy = {"temperature": 0.0}
    made = await submit(FOR_ALL, pooling=inference_pb2.POOLING_MEAN, sampling=greedy)
    assert not made.HasField("watermark")
    made = await submit(FOR_ALL, stopping={"max_tokens": 0}, prompt_logprobs=0, sampling=greedy)
    assert not made.HasField("watermark")


async def test_a_stream_is_not_resumed_with_another_watermark() -> None:
    """Otherwise its text would silently change."""
    request = inference_pb2.GenerateRequest(prompt={"text": "hi"}, **MARKED)
    digests = set()
    for rules in (RULES, replace(RULES, key=bytes(16)), replace(RULES, delta=1.0)):
        model = ServedModel(
            name="tiny", tokenizer=byte_tokenizer(), context_tokens=64, watermark=rules
        )
        made = await prepare(request, model, context(), resume_key=ResumeKey(bytes(32)))
        assert made.resume is not None
        digests.add(made.resume.digest)
    assert len(digests) == 3


def test_a_key_file_is_secret_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_watermark_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = read_watermark_key(file)
    assert len(key) == 16
    with pytest.raises(InvalidArgument, match="File exists"):
        write_watermark_key(file)
    assert read_watermark_key(file) == key
    other = tmp_path / "other"
    write_watermark_key(other)
    assert read_watermark_key(other) != key
    rules = WatermarkRules.load(WatermarkConfig(key_file=str(file), gamma=0.1))
    assert rules is not None
    secret = file.read_text().strip().removeprefix(KEY_PREFIX)
    assert key.hex() not in repr(rules)
    assert repr(key) not in repr(rules)
    assert secret not in repr(rules)
    assert rules.message().gamma == rules.gamma  # as workers have it, in float32


@pytest.mark.parametrize("text", ["", "x", KEY_PREFIX, KEY_PREFIX + "é", KEY_PREFIX + "A" * 42])
def test_a_wrong_key_file_is_refused_without_a_quotation(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"is no key of a watermark") as caught:
        read_watermark_key(file)
    assert not text or text not in str(caught.value)
    with pytest.raises(InvalidArgument, match="No such file"):
        read_watermark_key(tmp_path / "missing")


def test_tenants_need_a_key() -> None:
    with pytest.raises(ValueError, match=r"watermark\.tenants: needs watermark\.key_file"):
        WatermarkConfig(tenants=("ada",))
