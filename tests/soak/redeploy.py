"""Replaces a service by another of the same name, or drains workers of it, while streams run
through it: none may fail or change.

    python -m tandem.tests.soak.redeploy --streams 64
    python -m tandem.tests.soak.redeploy --streams 64 --drain

Serves a random model on a Ray cluster of four nodes on this machine and keeps streams going through
the gRPC client. Then it starts the second deployment beside the first, which ends; or it drains a
decode worker and a prefill worker, one after the other, by `tandem drain`, which has to be done
within 10 s each. Meanwhile requests over connections of their own, gRPC and HTTP, ask whether the
service is there. At the end the workers must be idle, and must not have computed a token again.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
import urllib.request
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tandem.cluster.config import TandemConfig, load_config
from tandem.cluster.serve.identity_file import read_identity
from tandem.cluster.serve.launch import Service, start_service
from tandem.cluster.service_url import ServiceAccess
from tandem.proto.errors import TandemError
from tandem.router.client.client import AsyncClient
from tandem.tests.service import wait_until_idle, workers
from tandem.tests.soak.nemesis import MODEL, cluster
from tandem.tests.soak.traffic import Traffic, fault_free, keep_going, make_cases
from tandem.tests.tiny import make_tiny_model

TANDEM: Final = (sys.executable, "-c", "from tandem.cluster.cli.main import main; main()")
DRAIN_SECONDS: Final = 10.0
FILL_SECONDS: Final = 60.0  # until all streams run
GRACE_SECONDS: Final = 60.0
"""Of the routers that are replaced: their streams end there. Those that are cut go on at another
router, where some tokens are computed again.
"""


@dataclass
class Disturbed:
    """Holds what was seen while a service was replaced, or workers of it drained."""

    traffic: Traffic = field(default_factory=Traffic)
    num_probes: int = 0
    unreachable: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # of both deployments
    seconds: float = (
        0.0  # from the start of the second deployment to the end of the first; of the longest drain
    )
    limit: float = math.inf  # of these
    recomputed: int = 0  # tokens, by the workers that are left

    @property
    def passed(self) -> bool:
        wrong = self.traffic.failed or self.traffic.altered or self.unreachable or self.recomputed
        in_time = self.seconds <= self.limit
        return bool(self.traffic.ended) and len(set(self.addresses)) == 1 and in_time and not wrong

    def __str__(self) -> str:
        gaps = [each.longest_gap for each in self.traffic.ended]
        lines = [
            f"streams {len(self.traffic.ended)}, tokens "
            f"{sum(each.num_tokens for each in self.traffic.ended)}",
            f"failed {len(self.traffic.failed)}, altered {len(self.traffic.altered)}",
            f"resumed by the client {sum(each.num_resumed > 0 for each in self.traffic.ended)}",
            f"tokens computed again {self.recomputed}",
            f"probes {self.num_probes}, unanswered {len(self.unreachable)}",
            f"longest gap of a stream {max(gaps, default=0):.2f} s, done within {self.seconds:.1f} "
            "s",
            *(f"FAILED  {each.case}: {each.error}" for each in self.traffic.failed[:12]),
            *(f"ALTERED {each.case}: {each.difference}" for each in self.traffic.altered[:12]),
            *(f"UNREACHABLE {each}" for each in self.unreachable[:12]),
        ]
        return "\n".join([*lines, "passed" if self.passed else "NOT PASSED"])


def replace_under_streams(
    first: TandemConfig,
    second: TandemConfig,
    folder: Path,
    address: str,
    *,
    streams: int,
    tokens: int,
) -> Disturbed:
    """Runs the first service, then both, then the second alone."""
    with joined(address), ExitStack() as before, ExitStack() as after:
        one = before.enter_context(start_service(first, str(folder), address=address))
        other = start_service(second, str(folder), address=address)
        return asyncio.run(_replace(one, before, other, after, streams=streams, tokens=tokens))


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Joins the cluster, so that neither service's end leaves it."""
    import ray

    ray.init(address=address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


async def _replace(
    one: Service,
    before: ExitStack,
    other: AbstractContextManager[Service],
    after: ExitStack,
    *,
    streams: int,
    tokens: int,
) -> Disturbed:
    found = Disturbed()
    async with streams_through(one, found, streams, tokens):
        began = time.monotonic()
        two = await asyncio.to_thread(after.enter_context, other)
        await asyncio.to_thread(one.wait)  # returns because it is replaced
        await asyncio.to_thread(before.close)
        found.seconds = time.monotonic() - began
        found.addresses = [listening(one), listening(two)]
    url, _ = await asyncio.to_thread(ServiceAccess(url=one.status_url).status)
    assert url == two.status_url, (
        "the commands do not find the page of the second deployment by that of the first"
    )
    read_identity(url)  # which `tandem drain` needs
    found.recomputed = await asyncio.to_thread(recomputed, two)
    return found


def drain_under_streams(
    config: TandemConfig, folder: Path, address: str, *, streams: int, tokens: int
) -> Disturbed:
    """Runs a service and drains workers of it."""
    with joined(address), start_service(config, str(folder), address=address) as service:
        return asyncio.run(_drain(service, streams=streams, tokens=tokens))


async def _drain(service: Service, *, streams: int, tokens: int) -> Disturbed:
    found = Disturbed(limit=DRAIN_SECONDS)
    async with streams_through(service, found, streams, tokens):
        for role in ("decode", "prefill"):
            async with asyncio.timeout(FILL_SECONDS):
                while found.traffic.num_running < streams:
                    await asyncio.sleep(0.05)
            known = await asyncio.to_thread(workers, service.status_url)
            drained = next(
                each["id"] for each in known if (each["role"], each["state"]) == (role, "ready")
            )
            began = time.monotonic()
            arguments = ("drain", drained, "--url", service.status_url)
            process = await asyncio.create_subprocess_exec(
                *TANDEM, *arguments, stdout=PIPE, stderr=STDOUT
            )
            output, _ = await process.communicate()
            found.seconds = max(found.seconds, time.monotonic() - began)
            if process.returncode:
                found.unreachable.append(f"tandem drain: {output.decode().strip()}")
    found.addresses = [listening(service)]
    found.recomputed = await asyncio.to_thread(recomputed, service)
    return found


def listening(service: Service) -> str:
    """Returns where the service listens, in whatever order its routers are."""
    return " ".join(
        sorted([*service.grpc_addresses, *service.http_addresses, *service.ops_addresses])
    )


@asynccontextmanager
async def streams_through(
    service: Service, found: Disturbed, streams: int, tokens: int
) -> AsyncIterator[None]:
    """Keeps streams and probes going, and waits for their ends."""
    known = await fault_free(service.grpc_addresses, make_cases(tokens))
    over = asyncio.Event()
    running = asyncio.create_task(
        keep_going(
            service.grpc_addresses, known, found.traffic, concurrency=streams, is_over=over.is_set
        )
    )
    probing = asyncio.create_task(_probe(service, found, over))
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(running, probing)


def recomputed(service: Service) -> int:
    """Waits until all workers are idle; returns how many tokens they have computed again."""
    wait_until_idle(service.status_url, 40)
    left = workers(service.status_url)
    assert len(left) == service.config.num_workers, left
    return sum(each["num_recomputed_tokens"] for each in left)


async def _probe(service: Service, found: Disturbed, over: asyncio.Event) -> None:
    """Asks for a token again and again, over new connections to each address."""
    while not over.is_set():
        for address in service.grpc_addresses:
            found.num_probes += 1
            try:
                async with AsyncClient(address, max_retries=2) as client:
                    await client.generate([5], max_tokens=1, timeout=30)
            except TandemError as error:
                found.unreachable.append(f"gRPC {error}")
        for address in service.http_addresses:
            found.num_probes += 1
            try:
                await asyncio.to_thread(_complete, address)
            except OSError as error:
                found.unreachable.append(f"HTTP {error}")


def _complete(address: str) -> Any:
    body = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def make_configs(
    folder: Path, name: str, status_port: int, num_routers: int, num_workers: int
) -> tuple[TandemConfig, TandemConfig]:
    """Returns two configurations of a service that differ, but not in the model."""
    overrides: dict[str, object] = {"model": str(folder), "name": name, "status_port": status_port}
    overrides |= {f"{role}.resources": {role: 1.0} for role in ("router", "prefill", "decode")}
    overrides |= {f"{pool}.num_threads": 1 for pool in ("prefill", "decode")}
    overrides |= {f"{pool}.kv_cache_gb": 0.25 for pool in ("prefill", "decode")}
    overrides |= {f"{pool}.replicas": num_workers for pool in ("prefill", "decode")}
    overrides |= {"router.replicas": num_routers, "router.grpc_port": 0, "router.http_port": 0}
    overrides |= {"grace_seconds": GRACE_SECONDS}
    # The second need not know where the status page of the first is.
    changes: dict[str, object] = {"decode.max_sequences": 80, "status_port": None}
    return load_config(None, overrides), load_config(None, overrides | changes)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem.tests.soak.redeploy", description=__doc__
    )
    parser.add_argument("--streams", type=int, default=64, help="at a time")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--drain", action="store_true", help="drain two workers instead")
    options = parser.parse_args(arguments)
    load = {"streams": options.streams, "tokens": options.tokens}
    with tempfile.TemporaryDirectory(prefix="tandem-redeploy-") as scratch, cluster() as address:
        folder = make_tiny_model(Path(scratch) / "tiny", dtype="bfloat16", **MODEL)
        configs = make_configs(folder, "replaced", 8224, 2, 2)
        if options.drain:
            found = drain_under_streams(configs[0], folder, address, **load)
        else:
            found = replace_under_streams(*configs, folder, address, **load)
    print(found)
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
