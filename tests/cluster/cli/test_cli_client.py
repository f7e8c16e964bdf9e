"""`tandem generate` and `tandem chat`: what they ask of a service and what they print."""

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cluster.cli import main
from tandem.cluster.cli.chat import ChatSession
from tandem.cluster.cli.questions import read_question
from tandem.proto import inference_pb2
from tandem.proto.errors import InvalidArgument, TandemError, Unavailable
from tandem.router.client.client import Client
from tandem.tests.stub_service import Refusal, Responses, StubService, pieces, stub_service

TANDEM = [sys.executable, "-c", "from tandem.cluster.cli.main import main; main()"]
WAIT = 60.0


def last_words(request: inference_pb2.GenerateRequest) -> Responses:
    """Answers with the last message or the text, in brackets."""
    chat = request.prompt.chat.messages
    return pieces(f"<{chat[-1].content if chat else request.prompt.text}>")


@pytest.fixture
def service() -> Iterator[StubService]:
    with stub_service(last_words) as running:
        yield running


def run(*args: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*TANDEM, *args], input=stdin, capture_output=True, text=True, timeout=WAIT
    )


def invoke(*args: str, stdin: str | bytes = "") -> tuple[str, str]:
    """What a command writes to stdout and stderr, in this process; raises what it raises."""
    done = CliRunner().invoke(main.app, args, input=stdin, catch_exceptions=False)
    return done.stdout, done.stderr


def test_prompts_from_everywhere(service: StubService, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("of a file")
    ways = [
        (("of the command",), ""),
        (("-",), "of stdin"),
        ((), "of a pipe"),
        (("--file", str(file)), ""),
    ]
    said = [
        invoke("generate", *args, "--url", service.address, stdin=stdin) for args, stdin in ways
    ]
    assert said == [
        (f"<{text}>\n", "") for text in ("of the command", "of stdin", "of a pipe", "of a file")
    ]
    with pytest.raises(
        InvalidArgument, match="file: must not be given together with another prompt"
    ):
        invoke("generate", "x", "--file", str(file), "--url", service.address)
    with pytest.raises(InvalidArgument, match="no/such: No such file"):
        invoke("generate", "--file", "/no/such", "--url", service.address)


@pytest.mark.parametrize(
    "command", [["generate"], ["generate", "-"], ["chat"], ["watermark", "detect", "-"]]
)
def test_a_text_on_stdin_that_is_not_utf_8_is_refused(
    service: StubService, command: list[str]
) -> None:
    with pytest.raises(InvalidArgument, match="stdin: not UTF-8"):
        invoke(*command, "--url", service.address, stdin="Zürich\n".encode("latin-1"))


def test_this_holds_in_the_locale_of_containers(service: StubService) -> None:
    """There Python reads other bytes as surrogates."""
    done = subprocess.run(
        [*TANDEM, "generate", "--url", service.address],
        input="Zürich\n".encode("latin-1"),
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        capture_output=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stderr) == (2, b"error: prompt: stdin: not UTF-8\n")


def test_what_the_encoding_of_a_terminal_lacks_becomes_question_marks(service: StubService) -> None:
    done = subprocess.run(
        [*TANDEM, "generate", "Zürich 東京", "--url", service.address],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=WAIT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "<Zürich ??>\n".encode("latin-1"),
        b"",
    )


def test_a_byte_order_mark_is_no_part_of_a_text(service: StubService, tmp_path: Path) -> None:
    file, text = tmp_path / "prompt.txt", "\ufeffhi\n"
    file.write_text(text, encoding="utf-8")
    invoke("generate", "--file", str(file), "--url", service.address)
    invoke("generate", "--url", service.address, stdin=text)
    invoke("chat", "--url", service.address, stdin=text)
    *texts, chat = [request.prompt for request in service.requests]
    assert [each.text for each in texts] == ["hi\n"] * 2
    assert chat.chat.messages[0].content == "hi"


def test_every_parameter_is_an_option(service: StubService, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    invoke(
        "generate",
        "hi",
        "--url",
        service.address,
        "--model",
        "m",
        "--request-id",
        "r",
        "--priority",
        "-3",
        "--service-tier",
        "fast",
        "--max-tokens",
        "9",
        "--min-tokens",
        "2",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-id",
        "5",
        "--ignore-eos",
        "--truncate-prompt",
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        "--top-p",
        "0.25",
        "--min-p",
        "0.125",
        "--typical-p",
        "0.75",
        "--repetition-penalty",
        "1.5",
        "--presence-penalty",
        "0.5",
        "--frequency-penalty",
        "-0.5",
        "--watermark",
        "--logit-bias",
        "7=-100",
        "--logit-bias",
        "8=1",
        "--bad-word",
        "worse",
        "--seed",
        "11",
        "--n",
        "2",
        "--best-of",
        "3",
        "--logprobs",
        "0",
        "--prompt-logprobs",
        "4",
        "--echo",
        "--json-schema",
        f"@{schema}",
    )
    assert service.requests == [
        inference_pb2.GenerateRequest(
            model="m",
            prompt=inference_pb2.Prompt(text="hi"),
            request_id="r",
            priority=-3,
            service_tier="fast",
            truncate_prompt=True,
            n=2,
            best_of=3,
            logprobs=0,
            prompt_logprobs=4,
            echo=True,
            sampling=inference_pb2.SamplingParams(
                temperature=0.5,
                top_k=3,
                top_p=0.25,
                min_p=0.125,
                typical_p=0.75,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={7: -100, 8: 1},
                bad_words=["worse"],
                watermark=True,
                seed=11,
            ),
            stopping=inference_pb2.StoppingParams(
                max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True
            ),
            constraint=inference_pb2.Constraint(json_schema='{"type": "object"}'),
        )
    ]


@pytest.mark.parametrize(
    ("args", "sampling"),
    [
        ((), inference_pb2.SamplingParams(temperature=0)),
        (("--n", "2"), inference_pb2.SamplingParams()),
        (("--beam-width", "2"), inference_pb2.SamplingParams()),
        (("--temperature", "1"), inference_pb2.SamplingParams(temperature=1)),
    ],
)
def test_one_completion_is_greedy_unless_told(
    service: StubService, args: tuple[str, ...], sampling: inference_pb2.SamplingParams
) -> None:
    invoke("generate", "hi", "--url", service.address, *args)
    assert service.requests[0].sampling == sampling


def test_constraints_and_beam_search(service: StubService, tmp_path: Path) -> None:
    grammar = tmp_path / "x.lark"
    grammar.write_text('start: "x"')
    ways = [
        (
            ("--choice", "yes", "--choice", "no"),
            inference_pb2.StringChoices(texts=["yes", "no"]),
            "choice",
        ),
        (("--regex", "a+"), "a+", "regex"),
        (("--json-object",), True, "json_object"),
        (("--grammar", f"@{grammar}"), 'start: "x"', "grammar"),
    ]
    for args, expected, field in ways:
        invoke("generate", "hi", "--url", service.address, *args)
        assert service.requests[-1].constraint == inference_pb2.Constraint(**{field: expected})  # type: ignore[arg-type]
    args = ("--beam-width", "4", "--length-penalty", "0.5", "--early-stopping")
    invoke("generate", "hi", "--url", service.address, *args)
    expected = inference_pb2.BeamSearch(width=4, length_penalty=0.5, early_stopping=True)
    assert service.requests[-1].beam_search == expected
    with pytest.raises(InvalidArgument, match="logit_bias: 'x' is not ID=BIAS"):
        invoke("generate", "hi", "--url", service.address, "--logit-bias", "x")


def scored(text: str, number: float | None) -> inference_pb2.TokenLogprobs:
    token = inference_pb2.Logprob(token_id=1, text=text.encode(), logprob=number)
    other = inference_pb2.Logprob(token_id=2, text=b"[red]", logprob=-3)
    return inference_pb2.TokenLogprobs(token=token, top=[other])


def two_choices(_: inference_pb2.GenerateRequest) -> Responses:
    length = inference_pb2.FINISH_REASON_LENGTH
    prompt = [scored("[", None), scored("b", -2)]
    yield inference_pb2.GenerateResponse(
        choice=1, text="second", token_ids=[1], logprobs=[scored("second", -1.25)]
    )
    yield inference_pb2.GenerateResponse(
        choice=0, text="first", prompt_logprobs=prompt, score=-0.5, finish_reason=length
    )
    yield from pieces("", choice=1, score=-1.5)


def test_several_choices_and_their_logprobs() -> None:
    with stub_service(two_choices) as service:
        out, err = invoke("generate", "hi", "--n", "2", "--url", service.address)
        assert out == "--- 0 (length)\nfirst\n--- 1 (stop)\nsecond\n"
        for word in (
            "prompt",
            "completion 1",
            "'second'",
            "-1.2500",
            "'[' ",
            " - ",
            "'[red]' -3.0000",
        ):
            assert word in err, (word, err)
        out, _ = invoke("generate", "hi", "--n", "2", "--beam-width", "2", "--url", service.address)
        assert out.startswith("--- 0 (length, score -0.5000)\n")
        out, err = invoke("generate", "hi", "--n", "2", "--json", "--url", service.address)
        found = json.loads(out)
        assert (out.count("\n"), err) == (1, "")
        assert [choice["text"] for choice in found["choices"]] == ["first", "second"]
        assert found["choices"][1]["logprobs"][0]["logprob"] == -1.25
        assert [each["logprob"] for each in found["prompt_logprobs"]] == [None, -2.0]
        assert found["timeline"] == {"request_id": "stub", "completion_tokens": 7}
        assert found["usage"]["prompt_tokens"] == 1
        assert found["usage"]["dropped_messages"] == 0
        assert {choice["stop_reason"] for choice in found["choices"]} == {None}


def test_the_json_of_a_token_that_is_never_drawn_has_no_infinity() -> None:
    def answer(request: inference_pb2.GenerateRequest) -> Responses:
        one, other = (
            inference_pb2.Logprob(token_id=number, text=b"x", logprob=logprob)
            for number, logprob in enumerate((0.0, -math.inf))
        )
        scores = inference_pb2.TokenLogprobs(token=one, top=[one, other])
        yield inference_pb2.GenerateResponse(text="x", token_ids=[0], logprobs=[scores])
        yield from pieces("")

    with stub_service(answer) as service:
        out, _ = invoke("generate", "hi", "--json", "--url", service.address)
    assert "Infinity" not in out
    (scored,) = json.loads(out)["choices"][0]["logprobs"]
    assert [each["logprob"] for each in scored["top"]] == [0.0, -9_999.0]


def test_a_late_error_is_below_what_was_printed() -> None:
    def fail(request: inference_pb2.GenerateRequest) -> Responses:
        yield inference_pb2.GenerateResponse(text="half")
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "lost")

    with stub_service(fail) as service:
        done = run("generate", "hi", "--url", service.address)
    assert (done.returncode, done.stdout, done.stderr) == (1, "half\n", "error: lost\n")


def test_a_piped_chat(service: StubService) -> None:
    questions = (
        'one\n\n"""two\nlines"""\ngoes \\\non\n//slash\n/retry\n/clear\nlast\n/quit\nnever\n'
    )
    out, err = invoke(
        "chat", "--url", service.address, "--system", "S", "--timeline", stdin=questions
    )
    assert out == "<one>\n<two\nlines>\n<goes \non>\n</slash>\n</slash>\n<last>\n"
    assert err.count("Where the time went") == 6
    roles = [
        [message.role for message in request.prompt.chat.messages] for request in service.requests
    ]
    talk = ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert roles == [talk[:2], talk[:4], talk[:6], talk, talk, talk[:2]]
    assert {request.prompt.chat.messages[0].content for request in service.requests} == {"S"}


def test_reasoning_and_a_cut_answer_of_a_chat(service: StubService) -> None:
    length = inference_pb2.FINISH_REASON_LENGTH

    def think(request: inference_pb2.GenerateRequest) -> Responses:
        yield inference_pb2.GenerateResponse(reasoning="Hm")
        yield inference_pb2.GenerateResponse(reasoning=".")
        answers = request.prompt.chat.messages[-1].content == "answer"
        yield from pieces("Yes." if answers else "", finish_reason=length)

    service.answer = think
    for question, answer, num_tokens in (("answer", "Yes.", 4), ("only think", "", 0)):
        out, err = invoke("chat", "--url", service.address, stdin=question)
        assert out == f"{answer}\n"
        assert err == f"Hm.\ncut off at {num_tokens} tokens; use --max-tokens\n"


def test_the_first_error_ends_a_piped_chat(service: StubService) -> None:
    done = run("chat", "--url", service.address, stdin="one\n/nonsense\ntwo\n")
    assert (done.returncode, done.stdout) == (2, "<one>\n")
    assert done.stderr == "error: /nonsense: no such command; /help lists them\n"


@pytest.fixture
def session(service: StubService) -> Iterator[ChatSession]:
    with Client(service.address) as client, open(os.devnull, "w") as nowhere:
        yield ChatSession(client, {"max_tokens": 5}, Console(file=nowhere))


def test_commands_of_a_chat(session: ChatSession) -> None:
    for line in ("/retry", "/whatever", "/quit now"):
        with pytest.raises(InvalidArgument):
            session.take(line)
    session.take("one")
    session.take("two")
    session.take("/help")
    assert [each["content"] for each in session.messages] == ["one", "<one>", "two", "<two>"]
    session.take("/clear")
    assert session.messages == []
    with pytest.raises(EOFError):
        session.take("/quit")


@pytest.mark.parametrize("said", ["", "half"])
def test_an_error_leaves_what_came(service: StubService, session: ChatSession, said: str) -> None:
    def fail(request: inference_pb2.GenerateRequest) -> Responses:
        yield inference_pb2.GenerateResponse(text=said)
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "lost")

    service.answer = fail
    with pytest.raises(Unavailable):
        session.take("one")
    assert [each["content"] for each in session.messages] == ["one", *filter(None, [said])]
    service.answer = last_words
    session.take("/retry")
    assert [each["content"] for each in session.messages] == ["one", "<one>"]


@pytest.mark.parametrize(
    ("typed", "questions"),
    [
        (["a", "b"], ["a", "b"]),
        (["a\\", "b", "c"], ["a\nb", "c"]),
        (['"""a', "", 'b"""', "c"], ["a\n\nb", "c"]),
        (['"""a"""', "c"], ["a", "c"]),
        (['"""', "a", '"""'], ["a"]),
        (["a\\"], ["a"]),
        (['"""a', "b"], ["a\nb"]),
        (["  a  "], ["a"]),
    ],
)
def test_questions_of_several_lines(typed: list[str], questions: list[str]) -> None:
    lines = iter(typed)

    def read_line(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert [read_question(read_line) for _ in questions] == questions
    with pytest.raises(EOFError):
        read_question(read_line)


class Terminal:
    """A `tandem` command at a terminal of its own."""

    def __init__(self, *args: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(home), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*TANDEM, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> None:
        """Waits until what was not yet expected matches, and takes it away."""
        deadline = time.monotonic() + WAIT
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 0.5)[0]:
                self.seen += os.read(self._master, 65536).decode()
        self.seen = self.seen[found.end() :]

    def interrupt(self, pattern: str) -> None:
        """Sends SIGINT, and again after 5 s, until the output matches: Python drops one that
        arrives in a finalizer.
        """
        for _ in range(int(WAIT / 5)):
            os.killpg(self.process.pid, signal.SIGINT)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and not re.search(pattern, self.seen):
                if select.select([self._master], [], [], 0.5)[0]:
                    self.seen += os.read(self._master, 65536).decode()
            if re.search(pattern, self.seen):
                break
        self.expect(pattern)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT)
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*args: str) -> Terminal:
        opened.append(Terminal(*args, home=tmp_path))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_a_chat_at_a_terminal(service: StubService, terminal: Callable[..., Terminal]) -> None:
    stuck = threading.Event()

    def answer(request: inference_pb2.GenerateRequest) -> Responses:
        question = request.prompt.chat.messages[-1].content
        if question == "fail":
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "no worker")
        if question == "long":
            yield inference_pb2.GenerateResponse(text="begun")
            stuck.wait(WAIT)
        yield from last_words(request)

    service.answer = answer
    chat = terminal("chat", "--url", service.address)
    chat.expect("> ")
    chat.type("fail\n")
    chat.expect("error: no worker[\r\n]+> ")  # and it goes on
    chat.type("long\n")
    chat.expect("begun")
    chat.interrupt("> ")
    stuck.set()
    chat.type("\x1b[A\x15and now?\n")  # up, then kill the line: editing works
    chat.expect("<and now\\?>[\r\n]+> ")
    chat.type("\x04")
    assert chat.process.wait(WAIT) == 0
    contents = [message.content for message in service.requests[-1].prompt.chat.messages]
    assert contents == ["long", "begun", "and now?"]

    again = terminal("chat", "--url", service.address)
    again.expect("> ")
    again.type("\x10\n")  # the line before, of the chat before
    again.expect("<and now\\?>")
    again.type("/quit\n")
    assert again.process.wait(WAIT) == 0


def test_errors_of_the_service_are_raised(service: StubService) -> None:
    def refuse(_: inference_pb2.GenerateRequest) -> Responses:
        raise Refusal(grpc.StatusCode.UNAUTHENTICATED, "who?")

    service.answer = refuse
    with pytest.raises(TandemError, match="who"):
        invoke("generate", "hi", "--url", service.address)
