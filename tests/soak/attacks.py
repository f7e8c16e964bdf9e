"""Attacks a running service for a minute in each of four ways, and measures what other callers
notice.

    tandem key create keys.json ada > ada.key && tandem key create keys.json eve > eve.key
    tandem serve smollm2-135m-instruct --api-keys keys.json
    python -m tandem.tests.soak.attacks --key ada.key --attacker-key eve.key

The attacks:

- `connections`: opens connections whose request ends after its answer, and connections that
  pipeline requests and read no answer, to the HTTP port and to the ops port; without a key.
- `texts`: sends texts of a megabyte to /tokenize, half of them chats of near misses of special
  tokens.
- `chats`: keeps 150 long chats at /tokenize.
- `messages`: sends gRPC messages of 4 MiB that hold millions of empty chat messages.

Each attacker is a process of its own, of lower priority (nice 10). Before and during
each attack the command times GET /health, GET /live of the ops port, a short chat at /tokenize, and
the gaps of four streams. Exits with 1 if p99 of /health is above 50 ms, if p99 of the gaps is more
than three times that before, if a probe failed, or if the router's memory stays above the level
before by more than 64 MiB.
"""

import argparse
import asyncio
import math
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import grpc
import psutil

from tandem.proto import inference_pb2
from tandem.router.client.client import AsyncClient
from tandem.tests.soak.samples import HEAD, line, quantile

ATTACKS: Final = ("connections", "texts", "chats", "messages")
HEALTH_SECONDS: Final = 0.05
MOST_GAPS: Final = 3.0
MOST_MIB: Final = 64.0
NUM_STREAMS: Final = 4
_NUM_CONNECTIONS: Final = 1_100  # at each port: more than one address may have
_NUM_CHATS: Final = 150
_TEXT: Final = ("The quick brown fox, 1234567890, jumps over the lazy dog. " * 20_000)[:999_000]
_LONG_CHAT: Final = [{"role": "user", "content": "lorem ipsum dolor sit amet " * 40}] * 55
_SHORT_CHAT: Final = [{"role": "user", "content": "Hi"}]
_SETTLE_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.02  # between two probes


@dataclass(frozen=True, kw_only=True)
class Service:
    """Names the addresses of the service, and the key of a caller."""

    http: str
    grpc: str
    ops: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        """Returns the headers of a caller with the key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


# ---- attackers


async def hold_connection(url: str, path: str, is_late: bool) -> None:
    """Keeps a connection that is of no use, and opens another one when the server ends it."""
    parts = urlsplit(url)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(
                connection, (str(parts.hostname), parts.port or 80)
            )
            reader, writer = await asyncio.open_connection(sock=connection, limit=2**16)
            try:
                if is_late:
                    writer.write(f"{head}Content-Length: 1\r\n\r\n".encode())
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(b"x")
                    await reader.read(2**20)
                    await reader.read()
                else:
                    writer.write(f"{head}\r\n".encode() * 4_000)
                    await writer.drain()
                    await asyncio.sleep(60)
            finally:
                writer.close()
        await asyncio.sleep(0.2)


async def attack_connections(service: Service) -> None:
    """Holds connections to both ports, half of them with late bodies, half with unread answers."""
    holders = [
        hold_connection(url, path, number % 2 == 0)
        for number in range(_NUM_CONNECTIONS)
        for url, path in ((service.http, "/health"), (service.ops, "/live"))
    ]
    await asyncio.gather(*holders)


async def post_again_and_again(
    service: Service, path: str, bodies: Sequence[dict[str, Any]], num_senders: int
) -> None:
    """Posts the bodies by turns, `num_senders` at a time, and counts the answers."""
    answers: Counter[int | str] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=service.headers, connector=connector) as session:

        async def send(first: int) -> None:
            number = first
            while True:
                body = bodies[number % len(bodies)]
                number += 1
                try:
                    async with session.post(service.http + path, json=body) as response:
                        await response.read()
                        answers[response.status] += 1
                        if response.status >= 400:
                            await asyncio.sleep(0.05)
                except (aiohttp.ClientError, TimeoutError) as error:
                    answers[type(error).__name__] += 1
                    await asyncio.sleep(0.05)

        try:
            await asyncio.gather(*map(send, range(num_senders)))
        finally:
            print(f"answers {dict(answers)}", flush=True)


async def attack_texts(service: Service) -> None:
    """Sends long texts, and long chats of near misses of special tokens."""
    bodies: list[dict[str, Any]] = [{"prompt": _TEXT}]
    for unit in ("<", "<|", "[", "<|im_"):
        text = (unit * 999_000)[:999_000]
        bodies += [{"messages": [{"role": "user", "content": text}]}, {"prompt": _TEXT}]
    await post_again_and_again(service, "/tokenize", bodies, 4)


async def attack_chats(service: Service) -> None:
    """Keeps many long chats waiting."""
    await post_again_and_again(service, "/tokenize", [{"messages": _LONG_CHAT}], _NUM_CHATS)


def _length_delimited(number: int, data: bytes) -> bytes:
    """Returns a protobuf field of bytes, texts or a message."""
    head = b""
    for value in (number << 3 | 2, len(data)):
        while value > 127:
            head += bytes((value & 127 | 128,))
            value >>= 7
        head += bytes((value,))
    return head + data


def _message_of_many() -> bytes:
    """Returns a TokenizeRequest of nearly 4 MiB of empty chat messages."""

    def number(message: Any, name: str) -> int:
        return int(message.DESCRIPTOR.fields_by_name[name].number)

    empty = _length_delimited(number(inference_pb2.Chat, "messages"), b"")
    chat = empty * ((4 * 2**20 - 64) // len(empty))
    prompt = _length_delimited(number(inference_pb2.Prompt, "chat"), chat)
    return _length_delimited(number(inference_pb2.TokenizeRequest, "prompt"), prompt)


async def attack_messages(service: Service) -> None:
    """Sends large messages of many parts over gRPC, and counts the status codes."""
    body = _message_of_many()
    codes: Counter[str] = Counter()
    metadata = (("authorization", f"Bearer {service.key}"),) if service.key else ()
    target = service.grpc.removeprefix("grpc://")
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        call = channel.unary_unary("/tandem.v1.Inference/Tokenize", bytes, bytes)

        async def send() -> None:
            while True:
                try:
                    await call(body, timeout=60, metadata=metadata)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1
                    await asyncio.sleep(0.05)

        try:
            await asyncio.gather(*(send() for _ in range(8)))
        finally:
            print(f"answers {dict(codes)}", flush=True)


_ATTACKERS: Final[dict[str, Callable[[Service], Awaitable[None]]]] = {
    "connections": attack_connections,
    "texts": attack_texts,
    "chats": attack_chats,
    "messages": attack_messages,
}


async def attack(kind: str, service: Service) -> None:
    """Runs an attack until its stdin ends."""
    attacker = asyncio.ensure_future(_ATTACKERS[kind](service))
    await asyncio.to_thread(sys.stdin.read)
    attacker.cancel()
    with suppress(asyncio.CancelledError):
        await attacker


# ---- what others notice


@dataclass
class Noticed:
    """Collects seconds of probes and of gaps between tokens, and probes that failed."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, seconds: float) -> None:
        """Adds a time of that name."""
        self.seconds.setdefault(name, []).append(seconds)


async def probe(
    noticed: Noticed, name: str, session: aiohttp.ClientSession, url: str, body: Any = None
) -> None:
    """Asks again and again until it is cancelled."""
    while True:
        began = time.perf_counter()
        try:
            async with session.request("GET" if body is None else "POST", url, json=body) as reply:
                await reply.read()
            if reply.status == 200:
                noticed.add(name, time.perf_counter() - began)
            else:
                noticed.failed[f"{name}: {reply.status}"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            noticed.failed[f"{name}: {type(error).__name__}"] += 1
        await asyncio.sleep(_PAUSE_SECONDS)


async def follow(noticed: Noticed, client: AsyncClient, number: int) -> None:
    """Reads one stream after the other until it is cancelled."""
    while True:
        last = 0.0
        prompt = f"Story {number}: once upon a time"
        async with client.stream(
            prompt, max_tokens=400, ignore_eos=True, seed=number, timeout=600
        ) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if delta.token_ids and last:
                    noticed.add("gap", now - last)
                last = now if delta.token_ids else last


async def measure(service: Service, seconds: float) -> Noticed:
    """Returns what callers other than the attacker notice in that time."""
    noticed = Noticed()
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        AsyncClient(service.grpc, api_key=service.key) as client,
        aiohttp.ClientSession(headers=service.headers, timeout=timeout) as session,
    ):
        chat = {"messages": _SHORT_CHAT}
        probes = [
            probe(noticed, "/health", session, f"{service.http}/health"),
            probe(noticed, "/live", session, f"{service.ops}/live"),
            probe(noticed, "short chat", session, f"{service.http}/tokenize", chat),
            *(follow(noticed, client, number) for number in range(NUM_STREAMS)),
        ]
        tasks = [asyncio.ensure_future(each) for each in probes]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            noticed.failed[f"stream: {task.exception()}"] += 1
    return noticed


def router_of(url: str) -> psutil.Process:
    """Returns the process that listens on the port of the URL."""
    port = urlsplit(url).port
    for each in psutil.net_connections("tcp"):
        if (
            each.status == psutil.CONN_LISTEN
            and each.pid
            and getattr(each.laddr, "port", 0) == port
        ):
            return psutil.Process(each.pid)
    raise SystemExit(f"no process of this machine listens on the port of {url}")


def mebibytes(process: psutil.Process) -> float:
    """Returns the memory of a process and of its children."""
    try:
        found = [process, *process.children(recursive=True)]
        return float(sum(each.memory_info().rss for each in found) / 2**20)
    except psutil.NoSuchProcess:
        raise SystemExit("NOT PASSED: the router has ended, or one of its processes") from None


@asynccontextmanager
async def attacked(kind: str, arguments: Sequence[str]) -> AsyncIterator[None]:
    """Runs an attack in a process of its own; prints what it says when it has ended."""
    command = [sys.executable, "-m", "tandem.tests.soak.attacks", *arguments, "--attack", kind]
    pipe = asyncio.subprocess.PIPE
    attacker = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        await asyncio.sleep(3)  # the attack begins
        yield
    finally:
        try:
            said, _ = await asyncio.wait_for(attacker.communicate(), _SETTLE_SECONDS)
            print(said.decode().strip())
        except TimeoutError:  # it is busy with its own connections
            attacker.kill()
            await attacker.wait()


def faults(kind: str, before: Noticed, during: Noticed, grown: float) -> list[str]:
    """Names the bounds that an attack has broken."""
    found = []
    never = [math.inf]
    health = quantile(during.seconds.get("/health", never), 0.99)
    ratio = quantile(during.seconds.get("gap", never), 0.99)
    ratio /= quantile(before.seconds["gap"], 0.99)
    print(
        f"p99 of /health {1e3 * health:.1f} ms, at most {1e3 * HEALTH_SECONDS:g} is wanted; "
        f"p99 of the gaps during / before {ratio:.2f}, at most {MOST_GAPS:g} is wanted; "
        f"memory {grown:+.0f} MiB, at most {MOST_MIB:+g} is wanted"
    )
    if health > HEALTH_SECONDS:
        found.append(f"{kind}: p99 of /health")
    if ratio > MOST_GAPS:
        found.append(f"{kind}: gaps")
    if grown > MOST_MIB:
        found.append(f"{kind}: memory")
    if math.isnan(health + ratio):
        found.append(f"{kind}: nothing was answered")
    return found + [f"{kind}: {what} ({count} times)" for what, count in during.failed.items()]


async def run(options: argparse.Namespace, service: Service, arguments: Sequence[str]) -> bool:
    """Measures and prints; returns whether every bound holds."""
    broken: list[str] = []
    router = router_of(service.http)
    await measure(service, 5)
    for kind in options.only or ATTACKS:
        memory = mebibytes(router)
        before = await measure(service, options.before)
        async with attacked(kind, arguments):
            during = await measure(service, options.seconds)
        await asyncio.sleep(_SETTLE_SECONDS)
        print(f"attack of {kind}, ms")
        print(HEAD)
        for name in sorted(before.seconds):
            print(line(f"{name} before", before.seconds[name]))
            if name in during.seconds:
                print(line(f"{name} during", during.seconds[name]))
            else:
                print(f"{name} during: never")
        broken += faults(kind, before, during, mebibytes(router) - memory)
    print("\n".join(["NOT PASSED", *broken] if broken else ["passed"]))
    return not broken


def read_key(path: str) -> str:
    """Returns the key in a file, or none."""
    return Path(path).read_text().split()[-1] if path else ""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.attacks", description=__doc__
    )
    parser.add_argument("--http", default="http://127.0.0.1:8080")
    parser.add_argument("--grpc", default="grpc://127.0.0.1:50051")
    parser.add_argument("--ops", default="http://127.0.0.1:9464")
    parser.add_argument("--key", default="", help="a file with the key of the measured caller")
    parser.add_argument("--attacker-key", default="", help="a file with the key of the attacker")
    parser.add_argument("--before", type=float, default=30.0, help="seconds measured before each")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    parser.add_argument("--only", nargs="+", choices=ATTACKS)
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    key = read_key(options.attacker_key if options.attack else options.key)
    service = Service(http=options.http, grpc=options.grpc, ops=options.ops, key=key)
    if options.attack:
        os.nice(10)  # the attacker's computer would take no time from the service's
        asyncio.run(attack(options.attack, service))
        return 0
    return 0 if asyncio.run(run(options, service, arguments)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
