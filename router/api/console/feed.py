"""Gathers the data of the console: the state of the service, and the requests of this router.

A poll names the items that the page has by a cursor, and gets the newer ones. All polls share one
description of the service. The requests in an answer depend on the caller's key.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

from ....proto import worker_pb2
from ....proto.errors import InvalidArgument
from ....proto.shared_result import SharedResult
from ...auth.authenticator import Caller
from ...telemetry.requests import RequestTelemetry
from .request_log import FIRST_NUMBER, RequestLog, describe

SAMPLE_SECONDS: Final = 1.0
MAX_RUNNING: Final = 64
"""Running requests that one answer lists; it also has the number of all."""

_WORKER_FACTS: Final = {
    "id",
    "worker_id",
    "role",
    "state",
    "draining",
    "integrity_ok",
    "epoch",
    "address",
    "tp",
    "transports",
    "kv_bytes_per_token",
    "block_size",
    "context_tokens",
    "max_sequences",
    "mixed_chunk_tokens",
    "num_states",
    "layout",
    "application",
}
"""The fields of a worker that every caller sees. They do not change with requests, of which some
belong to other tenants.
"""

_CURSOR: Final = re.compile(r"([0-9a-f]{8})\.([0-9]{1,15})")


class ConsoleFeed:
    """Answers the polls of the page, while `run` runs. Lives in one event loop."""

    def __init__(
        self,
        telemetry: RequestTelemetry,
        describe_service: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        workers: Callable[[], Iterable[worker_pb2.WorkerInfo]] = lambda: (),
        explain: Callable[[int, int], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        """`telemetry` follows the requests of the router.

        `describe_service` returns the content of the status page; None: the console shows no
        service. `workers` returns the workers that the router knows. `explain` returns the
        arithmetic of the model for numbers of prompt and output tokens; None: it is not known.
        """
        self.explain = explain
        self.log = RequestLog(telemetry)
        self._workers = workers
        self._known: Mapping[str, worker_pb2.WorkerInfo] | None = None
        self._start = secrets.token_hex(4)  # tells cursors of another process apart
        # JSON by Caller.sees_all.
        self._described: SharedResult[dict[bool, str]] = SharedResult(
            lambda: _encode(describe_service), SAMPLE_SECONDS
        )

    async def run(self) -> None:
        """Takes a sample each second, until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        """Takes one sample of the requests, and adds events for changes of the workers."""
        self.log.sample()
        workers = {each.worker_id: each for each in self._workers()}
        if self._known is not None:
            now = round(time.time(), 1)
            for event in worker_changes(self._known, workers):
                self.log.events.add({"time": now, "kind": "worker", **event})
        self._known = workers

    async def answer(self, cursor: str, caller: Caller) -> bytes:
        """Returns JSON: the service, the running requests, and the other items after `cursor`.

        `cursor`: of an earlier answer, or "". Raises InvalidArgument.
        """
        described = await self._described.get()
        log = self.log
        now = time.monotonic()
        number = self._parse(cursor, next(log.numbers))
        running = [each for each in log.running if _sees(caller, each.facts.tenant)]
        ended = [each for each in log.ended.after(number) if _sees(caller, each[1]["tenant"])]
        events = [
            each
            for each in log.events.after(number)
            if each[1]["kind"] == "worker" or _sees(caller, each[1]["tenant"])
        ]
        samples = log.samples.after(number)
        # Only items that the caller sees may move the cursor.
        last = max((each for each, _ in (*ended, *events, *samples)), default=number)
        found = {
            "cursor": f"{self._start}.{last}",
            "is_whole": number == 0,
            "time": round(time.time(), 3),
            "viewer": {
                "key": caller.key_name,
                "tenant": caller.tenant,
                "sees_all": caller.sees_all,
            },
            "num_running": len(running),
            "running": [describe(each, now) for each in running[-MAX_RUNNING:]],
            "ended": [each for _, each in ended],
            "events": [each for _, each in events],
            "samples": [
                each.of_all() if caller.sees_all else each.of(caller.tenant) for _, each in samples
            ],
        }
        return f'{{"service": {described[caller.sees_all]}, {json.dumps(found)[1:]}'.encode()

    def _parse(self, cursor: str, last: int) -> int:
        """Returns the number of the last item that the caller has, 0 if it has none.

        `last`: the greatest number that this process has given to an item.
        """
        if not cursor:
            return 0
        found = _CURSOR.fullmatch(cursor)
        if found is None:
            raise InvalidArgument("must be the cursor of an earlier answer, or absent", "cursor")
        number = int(found[2])
        return number if found[1] == self._start and FIRST_NUMBER <= number <= last else 0


def worker_changes(
    before: Mapping[str, worker_pb2.WorkerInfo], after: Mapping[str, worker_pb2.WorkerInfo]
) -> list[dict[str, str]]:
    """Returns an event for each worker that came, left, restarted, switched or began to drain."""
    found = []
    for worker_id in sorted(before.keys() | after.keys()):
        old, new = before.get(worker_id), after.get(worker_id)
        if new is None:
            found.append({"worker": worker_id, "cause": "left"})
        elif old is None:
            found.append({"worker": worker_id, "cause": "joined"})
        elif new.epoch != old.epoch:
            cause = "restarted" if new.role == old.role else "switched"
            found.append({"worker": worker_id, "cause": cause})
        elif new.draining and not old.draining:
            found.append({"worker": worker_id, "cause": "draining"})
    return found


def _sees(caller: Caller, tenant: str) -> bool:
    return caller.sees_all or (caller.tenant == tenant != "")


def without_loads(service: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a service without the fields that depend on its requests."""
    workers = [
        {name: each[name] for name in each if name in _WORKER_FACTS} for each in service["workers"]
    ]
    return {**service, "workers": workers}


def with_text_epochs(service: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a service with the epochs of its workers as text.

    An epoch has up to 64 bits, but JavaScript rounds integers beyond 53 bits. Ids and cursors are
    text already; all other integers are counts and sizes.
    """
    workers = [{**each, "epoch": str(each["epoch"])} for each in service["workers"]]
    return {**service, "workers": workers}


async def _encode(
    describe_service: Callable[[], Awaitable[dict[str, Any]]] | None,
) -> dict[bool, str]:
    if describe_service is None:
        return {True: "null", False: "null"}
    service = with_text_epochs(await describe_service())
    return {True: json.dumps(service), False: json.dumps(without_loads(service))}
