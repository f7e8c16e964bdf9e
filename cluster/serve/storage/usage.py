"""Counts what the keys use at one router, and reports it to the store."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from ....proto.errors import Unavailable
from ....router.storage.interface import KeyUsage, Storage
from ....router.storage.usage import day_of
from ....router.telemetry.requests import EndedRequest

log = logging.getLogger(__name__)

REPORT_SECONDS: Final = 10.0

_Key = tuple[str, str, str]  # day, name of the key, tenant


class UsageReporter:
    """Counts requests at their end; `run` reports the counts without end.

    What a router has not reported when it dies is lost: requests of the last REPORT_SECONDS.
    """

    def __init__(self, storage: Storage, name: str, clock: Callable[[], float] = time.time) -> None:
        """`name`: of the router, unlike all others. `clock`: seconds since the epoch."""
        self._storage = storage
        self._name = name
        self._clock = clock
        self._counts: dict[_Key, Counter[str]] = {}  # that no report has
        self._report: list[KeyUsage] = []  # the last one, until the store has answered
        self._number = 0  # of the last report

    def record(self, ended: EndedRequest) -> None:
        """Counts a request, unless it was refused."""
        if ended.was_refused:
            return
        facts = ended.facts
        has_begun = ended.num_generated > 0 or ended.is_complete
        key = day_of(self._clock()), facts.key_name, facts.tenant
        self._counts.setdefault(key, Counter()).update(
            requests=1,
            failed=ended.error not in ("", "CANCELLED"),
            prompt_tokens=facts.num_prompt if has_begun else 0,
            cached_tokens=ended.timeline.cached_tokens if has_begun else 0,
            generated_tokens=ended.num_generated,
        )

    async def run(self) -> None:
        """Reports the counts until it is cancelled."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self.report()

    async def report(self) -> None:
        """Reports the counts. After a failure, the next call repeats the report first."""
        try:
            if self._report:
                await self._send()
            if self._counts:
                self._number += 1
                self._report = [
                    KeyUsage(day=day, key_name=key_name, tenant=tenant, **counts)
                    for (day, key_name, tenant), counts in self._counts.items()
                ]
                self._counts = {}
                await self._send()
        except Unavailable as error:
            log.warning("the usage of API keys is reported later: %s", error.message)

    async def _send(self) -> None:
        await self._storage.add_usage(self._name, self._number, self._report)
        self._report = []
