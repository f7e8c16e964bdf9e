"""The servers that a benchmark measures: one answer at a time, as the arrival times of its chunks."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol

import aiohttp

from ...proto.errors import TandemError, Unavailable
from ...router.client.client import AsyncClient
from ...router.client.types import Options
from .metrics import FailureReason
from .options import ServerAddress
from .workload import BenchPrompt

_ASK_SECONDS: Final = 10.0
_MAX_DETAIL: Final = 200  # characters of what a server says about a failure
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MAX_BODY_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of one request, as the server counts them."""

    prompt_tokens: int
    output_tokens: int


class RequestFailed(Exception):
    """A request that did not complete."""

    def __init__(self, kind: str, detail: object = "") -> None:
        super().__init__(kind)
        self.failure = FailureReason(kind=kind, detail=" ".join(str(detail).split())[:_MAX_DETAIL])


class BenchServer(Protocol):
    """A server. Serves any number of requests at the same time in one event loop."""

    async def stream(self, prompt: BenchPrompt, chunk_times: list[float]) -> TokenCounts:
        """Sends a request; appends the time (perf_counter) of each chunk that bears tokens. Raises RequestFailed."""


@asynccontextmanager
async def open_target(address: ServerAddress, *, ignore_eos: bool) -> AsyncIterator[BenchServer]:
    """A server, ready to be measured. Raises Unavailable if it has to be asked for its model and does not answer."""
    if address.is_grpc:
        async with AsyncClient(address.url.removeprefix("grpc://"), max_retries=0) as client:
            yield GrpcBenchServer(client, address.model, ignore_eos)
        return
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        model = address.model or await _first_model(session, address.url)
        yield HttpBenchServer(session, address.url, model, ignore_eos)


class GrpcBenchServer:
    """A Tandem service's gRPC door."""

    def __init__(self, client: AsyncClient, model: str, ignore_eos: bool) -> None:
        self._client = client
        self._options = Options(temperature=0.0, ignore_eos=ignore_eos)
        if model:
            self._options["model"] = model

    async def stream(self, prompt: BenchPrompt, chunk_times: list[float]) -> TokenCounts:
        """See Target."""
        options = Options(**self._options, max_tokens=prompt.max_tokens)
        usage = None
        try:
            async with self._client.stream(prompt.content, **options) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        chunk_times.append(perf_counter())
                    usage = delta.usage or usage
        except TandemError as error:
            raise RequestFailed(error.code, error.message) from None
        if usage is None or not chunk_times:
            raise RequestFailed("no tokens", "the stream ended without tokens or without its usage")
        return TokenCounts(prompt_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens)


class HttpBenchServer:
    """An OpenAI-compatible server's /v1/completions."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, ignore_eos: bool) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._body = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if ignore_eos else {})

    async def stream(self, prompt: BenchPrompt, chunk_times: list[float]) -> TokenCounts:
        """See Target."""
        body = self._body | {"prompt": prompt.content, "max_tokens": prompt.max_tokens}
        events = CompletionEvents(chunk_times)
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    text = (await response.content.read(_MAX_BODY_BYTES)).decode(errors="replace")
                    raise RequestFailed(f"HTTP {response.status}", _error_text(text))
                async for data in response.content.iter_any():
                    events.feed(data, perf_counter())
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("cannot connect", f"nobody answers at {error.host}:{error.port}") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise RequestFailed("stream cut", error) from None
        own = len(prompt.content) if isinstance(prompt.content, list) else 0
        return events.usage(prompt_tokens=own)


class CompletionEvents:
    """Reads the server-sent events of one streamed completion, in pieces of any size. Does no I/O."""

    def __init__(self, chunk_times: list[float]) -> None:
        """`chunk_times`: gets the time of each chunk that holds a choice. Its text may be empty: what a special token
        or half a character gives is a token all the same, and `vllm bench serve` counts it too."""
        self._chunk_times = chunk_times
        self._rest = b""
        self._usage: dict[str, Any] = {}
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Takes what arrived at `now`. Raises RequestFailed for an error event and for what is no event at all."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise RequestFailed("bad answer", f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def usage(self, prompt_tokens: int) -> TokenCounts:
        """The tokens, after the end. A server that tells none had `prompt_tokens` and a token in each chunk.

        Raises RequestFailed if the stream ended too early."""
        if not self._done:
            raise RequestFailed("stream cut", "the stream ended without [DONE]")
        if not self._chunk_times:
            raise RequestFailed("no tokens", "the stream ended without a token")
        return TokenCounts(
            prompt_tokens=self._counted("prompt_tokens", prompt_tokens),
            output_tokens=self._counted("completion_tokens", len(self._chunk_times)),
        )

    def _counted(self, name: str, otherwise: int) -> int:
        count = self._usage.get(name)
        return count if isinstance(count, int) else otherwise

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed("bad answer", f"an event that is no JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise RequestFailed("bad answer", f"an event that is no object: {data[:80]!r}")
        if error := event.get("error"):
            raise RequestFailed("error event", _error_message(error))
        if event.get("choices"):
            self._chunk_times.append(now)
        if isinstance(usage := event.get("usage"), dict):
            self._usage = usage


def _error_text(body: str) -> object:
    """What an error's body says: OpenAI's message if it has one."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return body
    return _error_message(parsed["error"]) if isinstance(parsed, dict) and "error" in parsed else body


def _error_message(error: object) -> object:
    return error.get("message", error) if isinstance(error, dict) else error


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=_ASK_SECONDS)) as response:
            response.raise_for_status()
            return str((await response.json(content_type=None))["data"][0]["id"])
    except aiohttp.ClientConnectorError:
        raise Unavailable(f"nobody answers at {url}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unavailable(f"{url} does not tell its models: {error or 'no answer in time'}; give --model") from None
    except (ValueError, LookupError, TypeError):
        raise Unavailable(f"{url}/v1/models is not an OpenAI-compatible list of models; give --model") from None
