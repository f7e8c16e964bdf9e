"""Tests `tandem eval` against definitions, and the demo model against transformers."""

import functools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tandem.cluster.cli import main
from tandem.cluster.eval.generate import Case
from tandem.cluster.eval.perplexity import measure_perplexity, sliding_windows, tokenize_long
from tandem.cluster.eval.scores import exact_match, normalise_answer, score_texts, word_f1
from tandem.cluster.text_files import parse_lines
from tandem.proto import inference_pb2, limits
from tandem.proto.errors import InternalError, InvalidArgument, NotFound
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.client.client import AsyncClient
from tandem.router.frontend.served_model import ServedModel
from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests import demo_model
from tandem.tests.fleet import fleet
from tandem.tests.router.fake_source import FakeTokenSource, byte_tokenizer
from tandem.tests.stub_service import Refusal, Responses, StubService, pieces, stub_service

TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]

TEXT = (
    "The Danube rises in the Black Forest, where two small rivers meet, and flows for 2,850 "
    "kilometres through ten "
    "countries before it reaches the Black Sea. Four capitals stand on its banks: Vienna, "
    "Bratislava, Budapest and "
    "Belgrade.\n\ndef fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a "
    "+ b\n    return a\n\n"
    "Whoever reads a long text remembers its beginning badly. A model that sees only a window of "
    "it does so, too: what "
    "lies before the window is gone, and the first words inside are hard to guess. That is why the "
    "windows overlap, "
    "and why only the last part of each is counted.\n\n"
)


@given(num_tokens=st.integers(2, 300), window=st.integers(2, 64), data=st.data())
def test_every_token_but_the_first_counts_once(
    num_tokens: int, window: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, window - 1))
    windows = sliding_windows(num_tokens, window, stride)
    scored = Counter(index for _, end, score_from in windows for index in range(score_from, end))
    assert scored == Counter(range(1, num_tokens))
    for begin, end, score_from in windows:
        assert end - begin <= window
        # The minimum context of each token.
        assert score_from - begin >= min(window - stride, score_from)
        assert score_from < end


def test_windows_without_overlap_do_not_score_their_first_token() -> None:
    assert sliding_windows(10, 4, 4) == [(0, 4, 1), (4, 8, 5), (8, 10, 9)]


@pytest.mark.parametrize(
    ("window", "stride", "field"), [(8, 0, "stride"), (8, 9, "stride"), (1, 1, "window")]
)
def test_windows_that_make_no_sense_are_refused(window: int, stride: int, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sliding_windows(10, window, stride)
    assert caught.value.field == field


def logprob(prompt: Sequence[int], index: int) -> float:
    """Returns a log probability of the stub's model; it depends on earlier tokens in the window."""
    return -((prompt[index] * 31 + sum(prompt[:index])) % 97) / 10


def score_prompt(request: inference_pb2.GenerateRequest) -> Responses:
    """Returns the log probabilities of a prompt of tokens, and generates nothing."""
    ids = request.prompt.token_ids.ids
    assert request.stopping.HasField("max_tokens")
    assert request.stopping.max_tokens == 0
    assert request.HasField("prompt_logprobs")
    if len(ids) >= 64:  # as a service does: it always has room for a token after the prompt
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "prompt: does not fit the context")
    tokens = [
        inference_pb2.Logprob(token_id=each, logprob=logprob(ids, i)) for i, each in enumerate(ids)
    ]
    tokens[0].ClearField("logprob")
    made = [inference_pb2.TokenLogprobs(token=token) for token in tokens]
    yield from pieces("", prompt_logprobs=made, finish_reason=inference_pb2.FINISH_REASON_LENGTH)


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_service(score_prompt) as running:
        yield running


@pytest.mark.parametrize(("window", "stride"), [(32, 8), (50, 49), (None, None), (63, 30)])
async def test_perplexity_is_what_a_direct_computation_gives(
    service: StubService, window: int | None, stride: int | None
) -> None:
    text = "Größe, " + "words and words " * 20
    seen = []
    async with AsyncClient(service.address) as client:
        found = await measure_perplexity(
            client,
            text,
            window=window,
            stride=stride,
            on_window=lambda done, total: seen.append((done, total)),
        )
    ids = [256, *text.encode()]
    width = window or service.context_tokens - 1
    step = stride or width // 2
    total = 0.0
    for index in range(1, len(ids)):
        number = max(0, -(-(index + 1 - width) // step))  # the first window that reaches so far
        total -= logprob(ids[number * step :], index - number * step)
    assert found.nll == pytest.approx(total)
    assert (found.num_tokens, found.num_scored, found.num_bytes) == (
        len(ids),
        len(ids) - 1,
        len(text.encode()),
    )
    assert found.perplexity == pytest.approx(math.exp(total / (len(ids) - 1)))
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / len(text.encode()))
    assert seen == [(n, found.num_windows) for n in range(1, found.num_windows + 1)]


async def test_a_window_that_leaves_no_room_is_refused(service: StubService) -> None:
    async with AsyncClient(service.address) as client:
        with pytest.raises(
            InvalidArgument, match="window: must be at most 63 tokens, one less than"
        ):
            await measure_perplexity(client, "some text", window=64)


async def test_a_text_longer_than_the_context_of_a_real_service() -> None:
    text = "as long as several contexts " * 100
    served = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
    server = await ApiServers.start(GenerationService([served], FakeTokenSource()))
    try:
        async with AsyncClient(server.grpc_address) as client:
            found = await measure_perplexity(client, text)
    finally:
        await server.stop(0)
    assert found.num_windows > 5
    assert found.nll == pytest.approx(sum(byte + 1 for byte in text.encode()[1:]) / 1000)


async def test_a_missing_number_is_no_result(service: StubService) -> None:
    service.answer = lambda request: pieces("")
    async with AsyncClient(service.address) as client:
        with pytest.raises(InternalError, match="every token"):
            await measure_perplexity(client, "some text")


async def test_a_path_names_the_model_and_a_wrong_name_is_refused() -> None:
    """A service lists no paths."""
    served = ServedModel(name="tiny", tokenizer=byte_tokenizer(), context_tokens=512)
    service = GenerationService([served], FakeTokenSource(), aliases=["/models/tiny"])
    server = await ApiServers.start(service)
    try:
        async with AsyncClient(server.grpc_address) as client:
            by_name, by_path = [
                await measure_perplexity(client, "some text", model=name)
                for name in ("tiny", "/models/tiny")
            ]
            assert by_name == by_path
            with pytest.raises(NotFound, match="model: 'other' is not served here; served: tiny"):
                await measure_perplexity(client, "some text", model="other")
    finally:
        await server.stop(0)


async def test_long_texts_go_in_pieces(
    service: StubService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARACTERS", 16)
    text = "one line\nanother line\n" + "x" * 40 + "\nend"
    async with AsyncClient(service.address) as client:
        assert await tokenize_long(client, text, "") == [256, *text.encode()]
    assert "another line\n" in service.tokenized
    assert max(map(len, service.tokenized)) == 16


def invoke(*args: str) -> str:
    """Returns the stdout of a command in this process; raises its exception."""
    return CliRunner().invoke(main.app, args, catch_exceptions=False).stdout


def test_the_perplexity_command(service: StubService, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("some text " * 30)
    args = ("eval", "perplexity", str(file), "--url", service.address)
    found = json.loads(invoke(*args, "--window", "40", "--stride", "20", "--json"))
    assert (found["tokens"], found["windows"]) == (301, 15)
    assert found["perplexity"] == pytest.approx(math.exp(found["mean_nll"]))
    table = dict(
        line.rsplit(maxsplit=1)
        for line in invoke(*args, "--window", "40", "--stride", "20").splitlines()
    )
    assert (table["tokens"], table["perplexity"]) == ("301", f"{found['perplexity']:,.4f}")
    with pytest.raises(InvalidArgument, match="stride: must be from 1 to the window's 40 tokens"):
        invoke(*args, "--window", "40", "--stride", "41")
    (tmp_path / "empty").touch()
    done = subprocess.run(
        [*TANDEM, "eval", "perplexity", str(tmp_path / "empty"), "--url", service.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: text: has fewer than two tokens\n",
    )


def test_scores_are_the_libraries() -> None:
    texts = ["the cat sat on the mat today", "a dog barked at the old tree"]
    references = [
        ["the cat sat on the mat", "a cat was on the mat today"],
        ["the dog barked at a tree"],
    ]
    found = score_texts(texts, references)
    # None: no second reference.
    streams: Any = [
        [references[0][0], references[1][0]],
        [references[0][1], None],
    ]
    bleu = sacrebleu.corpus_bleu(texts, streams)
    assert found["bleu"] == pytest.approx(bleu.score)
    assert 0 < found["bleu"] < 100
    assert 0 < found["chrf"] < 100
    # Each text has 7 words, among them all 6 of a reference.
    assert found["rouge1"] == pytest.approx(100 * 12 / 13)
    assert found["exact_match"] == 0


def test_the_best_reference_counts() -> None:
    found = score_texts(["The cat sat on that mat!"], [["no", "the cat sat on that mat"]])
    assert {found[name] for name in ("rouge1", "rouge2", "rouge_l", "exact_match", "f1")} == {100}


@pytest.mark.parametrize(
    ("text", "reference", "exact", "f1"),
    [
        ("The Seine.", "seine", True, 1.0),
        ("It is the Seine", "Seine", False, 0.5),
        ("an apple a day", "apple day", True, 1.0),
        ("Rome", "Paris", False, 0.0),
        ("", "the", True, 1.0),
        ("", "Paris", False, 0.0),
        ("red red blue", "red green", False, 0.4),
    ],
)
def test_exact_match_and_f1(text: str, reference: str, exact: bool, f1: float) -> None:
    assert exact_match(text, reference) is exact
    assert word_f1(text, reference) == pytest.approx(f1)


def test_normalisation() -> None:
    assert normalise_answer("  The Theatre, an\tAnt (a-b)! ") == "theatre ant ab"


def write_cases(path: Path) -> Path:
    cases: list[dict[str, Any]] = [
        {"prompt": "Paris", "reference": "<Paris>", "id": 1},
        {"messages": [{"role": "user", "content": "Rome"}], "references": ["no", "the <Rome>"]},
        {"prompt": "x", "reference": "nothing alike"},
    ]
    path.write_text("\n".join(map(json.dumps, cases)) + "\n\n")
    return path


def echo(request: inference_pb2.GenerateRequest) -> Responses:
    chat = request.prompt.chat.messages
    return pieces(f"<{chat[-1].content if chat else request.prompt.text}>")


def test_the_generate_command(tmp_path: Path) -> None:
    file, output = write_cases(tmp_path / "cases.jsonl"), tmp_path / "answers.jsonl"
    with stub_service(echo) as service:
        args = (
            "eval",
            "generate",
            str(file),
            "--url",
            service.address,
            "--output",
            str(output),
            "--seed",
            "3",
        )
        found = json.loads(invoke(*args, "--max-tokens", "9", "--json"))
        table = invoke(*args)
    assert (found["cases"], found["exact_match"]) == (3, pytest.approx(200 / 3))
    assert f"exact match {found['exact_match']:,.4f}" in " ".join(table.split())
    request = next(each for each in service.requests if each.prompt.text == "Paris")
    assert request.sampling == inference_pb2.SamplingParams(temperature=0, seed=3)
    assert request.stopping == inference_pb2.StoppingParams(max_tokens=9)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert answers[0] == {
        "prompt": "Paris",
        "reference": "<Paris>",
        "text": "<Paris>",
        "finish_reason": "stop",
    }
    assert [each["text"] for each in answers] == ["<Paris>", "<Rome>", "<x>"]


def test_a_case_that_the_service_refuses_is_named(tmp_path: Path) -> None:
    def refuse(request: inference_pb2.GenerateRequest) -> Responses:
        if request.prompt.text == "Paris":
            return echo(request)
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "prompt: has 9 tokens")

    file = tmp_path / "cases.jsonl"
    file.write_text(
        '{"prompt": "Paris", "reference": "b"}\n\n{"prompt": "Rome", "reference": "b"}\n'
    )
    with stub_service(refuse) as service:
        args = ["eval", "generate", str(file), "--url", service.address]
        result = CliRunner().invoke(main.app, args)
    assert isinstance(result.exception, InvalidArgument)
    assert str(result.exception) == "case 2: prompt: has 9 tokens"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "cases.jsonl:2"),
        ('{"prompt": "a"}', "one of reference and references"),
        ('{"reference": "a"}', "one of prompt and messages"),
        ('{"prompt": "a", "messages": [{}], "reference": "b"}', "one of prompt and messages"),
        ('{"prompt": 3, "reference": "b"}', "prompt: "),
    ],
)
def test_bad_cases_are_named_by_their_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f'{{"prompt": "a", "reference": "b"}}\n{line}\n')
    with pytest.raises(InvalidArgument, match=words) as caught:
        parse_lines(path.read_text(), path, Case)
    assert caught.value.field == f"{path}:2"


def test_without_the_extra_one_line_names_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['sacrebleu'] = None; "
        "from tandem.cluster.cli.main import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "eval",
        "generate",
        str(write_cases(tmp_path / "cases.jsonl")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: tandem eval generate needs sacrebleu and rouge-score: pip install "
        "'tandem-llm[eval]'\n"
    )


@functools.cache
def transformers_perplexity(ids: tuple[int, ...], window: int, stride: int) -> float:
    """Runs the loop of "Perplexity of fixed-length models" in transformers' documentation.

    Unlike there, each window counts all the tokens whose loss it has.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.folder(), dtype=torch.float32)
    tokens = torch.tensor([ids])  # [1, tokens]
    nll, count, before = 0.0, 0, 0
    for begin in range(0, tokens.shape[1], stride):
        end = min(begin + window, tokens.shape[1])
        inputs = tokens[:, begin:end]  # [1, window]
        targets = inputs.clone()
        targets[:, : -(end - before)] = -100
        with torch.no_grad():
            loss = model(inputs, labels=targets).loss.item()
        scored = int((targets[:, 1:] != -100).sum())
        nll, count, before = nll + loss * scored, count + scored, end
        if end == tokens.shape[1]:
            break
    return math.exp(nll / count)


@pytest.mark.parametrize("prefill", [1, 0])
async def test_perplexity_of_the_demo_model_equals_transformers(prefill: int) -> None:
    served = ServedModel(
        name="demo", tokenizer=Tokenizer.load(demo_model.folder()), context_tokens=2048
    )
    async with fleet(prefill, 1, rank=lambda role: demo_model.rank(num_threads=1)) as running:
        server = await ApiServers.start(GenerationService([served], running.dispatcher))
        try:
            async with AsyncClient(server.grpc_address) as client:
                ids = await client.tokenize(TEXT)
                found = await measure_perplexity(client, TEXT, window=128, stride=64)
                # From a warm prefix cache.
                again = await measure_perplexity(client, TEXT, window=128, stride=64)
        finally:
            await server.stop(0)
    assert 150 <= len(ids) <= 225  # two windows or three
    expected = transformers_perplexity(tuple(ids), 128, 64)
    assert found.num_scored == len(ids) - 1
    assert found.perplexity == pytest.approx(expected, abs=1e-3)
    assert again.perplexity == pytest.approx(expected, abs=1e-3)
