"""Sends requests to the measured servers, and records the arrival time of each chunk."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, Final

import aiohttp

from ...proto.errors import TandemError, Unavailable
from ...router.client.client import AsyncClient
from ...router.client.types import Options
from ...router.client.wire import authorization
from .metrics import RequestFailed
from .options import ServerAddress
from .workload import BenchPrompt

_LIST_SECONDS: Final = 10.0
_MAX_LINE_BYTES: Final = 16 * 1024 * 1024
_MAX_BODY_BYTES: Final = 64 * 1024

StreamCompletion = Callable[[BenchPrompt, list[float]], Awaitable[tuple[int, int]]]
"""Sends a request; returns the numbers of prompt tokens and output tokens that the server counted.

Appends the time (perf_counter) of each chunk with tokens to the list. Raises RequestFailed. May be
called concurrently.
"""


@asynccontextmanager
async def open_target(
    address: ServerAddress, *, ignore_eos: bool
) -> AsyncIterator[StreamCompletion]:
    """Connects to a server. Raises Unavailable if its model is needed and it does not answer."""
    if address.url.startswith("grpc"):
        async with AsyncClient(
            address.url, api_key=address.api_key, tls=address.tls, max_retries=0
        ) as client:
            yield _stream_over_grpc(client, address.model, ignore_eos)
        return
    headers = authorization(address.api_key)
    connector = aiohttp.TCPConnector(limit=0, ssl=address.tls.context())
    timeout = aiohttp.ClientTimeout()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        model = address.model or await _first_model(session, address.url)
        yield _stream_over_http(session, f"{address.url}/v1/completions", model, ignore_eos)


def _stream_over_grpc(client: AsyncClient, model: str, ignore_eos: bool) -> StreamCompletion:
    """Returns the StreamCompletion of a Tandem service's gRPC API."""
    common = Options(temperature=0.0, ignore_eos=ignore_eos)
    if model:
        common["model"] = model

    async def stream_completion(prompt: BenchPrompt, chunk_times: list[float]) -> tuple[int, int]:
        usage = None
        try:
            async with client.stream(
                prompt.prompt, **Options(**common, max_tokens=prompt.max_tokens)
            ) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        chunk_times.append(perf_counter())
                    usage = delta.usage or usage
        except TandemError as error:
            raise RequestFailed(error.code, error.message) from None
        if usage is None or not chunk_times:
            raise RequestFailed("no tokens", "the stream ended without tokens or without its usage")
        return usage.prompt_tokens, usage.completion_tokens

    return stream_completion


def _stream_over_http(
    session: aiohttp.ClientSession, url: str, model: str, ignore_eos: bool
) -> StreamCompletion:
    """Returns the StreamCompletion of an OpenAI-compatible server's /v1/completions."""
    common: dict[str, Any] = {
        "model": model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        common["ignore_eos"] = True

    async def stream_completion(prompt: BenchPrompt, chunk_times: list[float]) -> tuple[int, int]:
        body = common | {"prompt": prompt.prompt, "max_tokens": prompt.max_tokens}
        events = CompletionEvents(chunk_times)
        try:
            async with session.post(url, json=body) as response:
                if response.status != 200:
                    text = (await response.content.read(_MAX_BODY_BYTES)).decode(errors="replace")
                    raise RequestFailed(f"HTTP {response.status}", _error_text(text))
                async for data in response.content.iter_any():
                    events.feed(data, perf_counter())
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed(
                "cannot connect", f"no server answers at {error.host}:{error.port}"
            ) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise RequestFailed("stream cut", error) from None
        own = len(prompt.prompt) if isinstance(prompt.prompt, list) else 0
        return events.token_counts(prompt_tokens=own)

    return stream_completion


class CompletionEvents:
    """Parses the server-sent events of one streamed completion, in pieces of any size; no I/O."""

    def __init__(self, chunk_times: list[float]) -> None:
        """Starts before the first event.

        `chunk_times`: receives the time of each chunk with a choice. The text of the choice may be
        empty, for instance for a special token or half a character; `vllm bench serve` counts such
        chunks as well.
        """
        self._chunk_times = chunk_times
        self._rest = b""
        self._usage: dict[str, Any] = {}
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """Parses the data that arrived at `now`.

        Raises RequestFailed for an error event and for an invalid event.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise RequestFailed("bad answer", f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def token_counts(self, prompt_tokens: int) -> tuple[int, int]:
        """Returns the numbers of prompt tokens and output tokens, after the end of the stream.

        If the server sent no usage, they are `prompt_tokens` and one token for each chunk. Raises
        RequestFailed if the stream ended too early.
        """
        if not self._done:
            raise RequestFailed("stream cut", "the stream ended without [DONE]")
        if not self._chunk_times:
            raise RequestFailed("no tokens", "the stream ended without a token")
        prompt, output = (self._usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        return (
            prompt if isinstance(prompt, int) else prompt_tokens,
            output if isinstance(output, int) else len(self._chunk_times),
        )

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed("bad answer", f"an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict):
            raise RequestFailed("bad answer", f"an event that is not an object: {data[:80]!r}")
        if error := event.get("error"):
            raise RequestFailed("error event", _error_message(error))
        if event.get("choices"):
            self._chunk_times.append(now)
        if isinstance(usage := event.get("usage"), dict):
            self._usage = usage


def _error_text(body: str) -> object:
    """Returns the text of an error response: OpenAI's message if it has one."""
    try:
        return _error_message(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body


def _error_message(error: object) -> object:
    return error.get("message", error) if isinstance(error, dict) else error


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(
            f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=_LIST_SECONDS)
        ) as response:
            response.raise_for_status()
            return str((await response.json(content_type=None))["data"][0]["id"])
    except aiohttp.ClientConnectorError:
        raise Unavailable(f"no server answers at {url}") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"{url} does not list its models: {error or 'no answer in time'}; give --model"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise Unavailable(
            f"{url}/v1/models is not an OpenAI-compatible list of models; give --model"
        ) from None
