"""Answers the lines of batches at one router, beside the requests of clients.

All routers claim lines from the store. If a router dies, the others claim its lines. A line whose
answer was lost is computed again; the store takes the first answer.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from ....proto.errors import Unavailable
from ....router.api.batches.lines import BatchRequest
from ....router.api.service import GenerationService
from ....router.auth.authenticator import Authenticator
from ....router.storage.batches import error_line
from ....router.storage.interface import MAX_WAIT_SECONDS, BatchLine, LineAnswer, LineKey
from ...local.batch import answer_line, send_patiently
from ...local.batch_senders import engine_sender

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0
# A line that is refused for longer gives its place up, perhaps to another tenant. Its next runner
# looks the key up again.
_PATIENCE_SECONDS: Final = 30.0
_LOWEST_PRIORITY: Final = -100


class BatchRunner:
    """Claims lines and answers them; `run` does so without end."""

    def __init__(
        self,
        service: GenerationService,
        authenticator: Authenticator,
        name: str,
        concurrency: int,
    ) -> None:
        """`name`: of the router, unlike all others. `concurrency`: lines at a time."""
        self._service = service
        self._storage = service.storage
        self._authenticator = authenticator
        self._name = name
        self._concurrency = concurrency
        self._tasks: dict[LineKey, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answers lines until it is cancelled; then other routers may claim the lines at once."""
        try:
            while True:
                await self._claim()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(Unavailable):
                await self._storage.release(self._name)

    async def _claim(self) -> None:
        """Claims lines for the free places; without one, waits until a line has been answered."""
        num_free = self._concurrency - len(self._tasks)
        wait = MAX_WAIT_SECONDS if num_free else 0.0
        try:
            lines = await self._storage.claim(self._name, list(self._tasks), num_free, wait)
        except Unavailable as error:
            log.warning("batches wait, because their storage does not answer: %s", error.message)
            await asyncio.sleep(_RETRY_SECONDS)
            return
        for line in lines:
            key = (line.batch_id, line.number)
            task = asyncio.create_task(self._answer(line))
            self._tasks[key] = task
            task.add_done_callback(partial(self._end, key))
        if len(self._tasks) >= self._concurrency:
            await asyncio.wait(
                self._tasks.values(),
                timeout=MAX_WAIT_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )

    def _end(self, key: LineKey, task: "asyncio.Task[None]") -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a line of a batch failed by a defect: %s", type(error).__name__)

    async def _answer(self, line: BatchLine) -> None:
        # Lines and answers have up to many megabytes, and the loop serves other requests.
        request = await asyncio.to_thread(BatchRequest.model_validate_json, line.request)
        caller = self._authenticator.caller_of(line.owner.tenant, line.owner.key_name)
        if caller is None:
            found = error_line(
                request.custom_id, "invalid_api_key", "the key of the batch is not valid any more"
            )
            has_failed = True
        else:
            caller = replace(caller, max_priority=_LOWEST_PRIORITY)
            try:
                answer = await send_patiently(
                    engine_sender(self._service, caller), request, _PATIENCE_SECONDS
                )
            except Unavailable:
                await asyncio.sleep(_RETRY_SECONDS)  # the same line may be the next one
                return
            found = await asyncio.to_thread(answer_line, request, answer)
            has_failed = answer.status != 200
        key = (line.batch_id, line.number)
        await self._report(LineAnswer(key=key, line=found, has_failed=has_failed), line.expires)

    async def _report(self, answer: LineAnswer, expires: float) -> None:
        """Stores an answer; tries again while the store does not answer."""
        while True:
            try:
                await self._storage.answer(answer)
            except Unavailable:
                if time.time() > expires:
                    return
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return
