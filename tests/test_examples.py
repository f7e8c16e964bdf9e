"""Runs the examples of README.md, docs/clients.md, docs/clients/ and docs/offline.md.

They use a service with scripted completions, or a tiny model in their own process.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tandem.cluster.serve.storage.runner import BatchRunner
from tandem.proto import inference_pb2
from tandem.router.api.server.servers import ApiServers
from tandem.router.api.service import GenerationService
from tandem.router.auth.authenticator import Authenticator
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import TokenDelta, TokenRequest
from tandem.tests.router.fake_source import EOS_ID, FakeTokenSource, byte_tokenizer
from tandem.tests.tiny import make_tiny_model
from tandem.tests.waits import WAIT

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = (
    "README.md",
    "docs/clients.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "clients").glob("*.md")),
    "docs/offline.md",
)
_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

_TEMPLATE = (
    "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call | tojson) + "
    "'</tool_call>' }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
_COMPLETIONS = (  # a text of the prompt, the completion
    ("[tool]", "It is sunny in Rome."),
    ("<tools>", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
    ("Extract the person", '{"name": "Ada Lovelace", "age": 36}'),
    ("This review is", " positive"),
    ("A date in ISO form", "1843-09-05"),
)


class Script:
    """Generates scripted completions where an example needs them: a TokenSource."""

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        """See TokenSource."""
        prompt = bytes(token for token in request.submit.token_ids if token < 256).decode()
        answer = next(
            ([*completion.encode(), EOS_ID] for text, completion in _COMPLETIONS if text in prompt),
            None,
        )
        async with aclosing(
            FakeTokenSource(answer=answer).generate(request, timeline, ended)
        ) as deltas:
            async for delta in deltas:
                yield delta


@dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples() -> list[Example]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in _BLOCK.finditer(text):
            if match[2].startswith("tandem "):
                continue  # e2e/test_readme.py runs it on a real service
            line = text.count("\n", 0, match.start()) + 1
            found.append(Example(page=page, line=line, language=match[1], code=match[2]))
    return found


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Returns the real addresses, by those that the pages name. The service runs in a thread of its
    own.
    """
    started: dict[str, str] = {}
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        model = ServedModel(
            name="smollm2-135m-instruct", tokenizer=byte_tokenizer(_TEMPLATE), context_tokens=2048
        )
        service = GenerationService([model], Script())
        server = await ApiServers.start(service)
        await server.set_serving(True)
        runner = asyncio.create_task(BatchRunner(service, Authenticator(), "router", 4).run())
        started.update(
            {"127.0.0.1:50051": server.grpc_address, "127.0.0.1:8080": server.http_address}
        )
        ready.set()
        await stop.wait()
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
        await server.stop(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(WAIT)
    yield started
    loop.call_soon_threadsafe(stop.set)
    thread.join(WAIT)
    assert not thread.is_alive()
    loop.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in place of the one that the pages run in their own process."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_pages_have_their_examples() -> None:
    pages = [each.page for each in examples() if each.language == "python"]
    assert pages.count("README.md") >= 1
    assert pages.count("docs/clients.md") >= 2
    assert sum(page.startswith("docs/clients/") for page in pages) >= 20
    assert pages.count("docs/offline.md") >= 2


@pytest.mark.parametrize("example", examples(), ids=str)
def test_example(example: Example, addresses: dict[str, str], model: Path, tmp_path: Path) -> None:
    if example.language == "bash" and shutil.which("curl") is None:
        pytest.skip("no curl here")
    code = example.code
    for written, real in (*addresses.items(), ('LLM("smollm2-135m-instruct"', f'LLM("{model}"')):
        code = code.replace(written, real)
    command = (
        [sys.executable, "-W", "error", "-c", code]
        if example.language == "python"
        else ["bash", "--noprofile", "--norc", "-c", code]
    )
    environment: dict[str, Any] = os.environ | {
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    if expected := _EXPECTED.get(next((text for text in _EXPECTED if text in code), "")):
        for text in expected:
            assert text in done.stdout


_EXPECTED = {  # a text of the example, what it prints
    "functions[call.name]": ["It is sunny in Rome."],
    "mood = client": ["Ada Lovelace", "positive", "1843-09-05"],
    "error.field": ["sampling.temperature | sampling.temperature: must be from 0 to 2", "True"],
    "BadRequestError": ["400 temperature"],
    "response_format": ["36"],
    "message.tool_calls or []": ["It is sunny in Rome."],
    "from anthropic": ["It is sunny in Rome."],
    "function_call_output": ["It is sunny in Rome."],
    "client.detokenize": ["The capital of France is", "smollm2-135m-instruct 2048"],
}
