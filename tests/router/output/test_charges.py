"""Tests how many generated tokens a caller is charged for."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from typing import Any

import pytest

from tandem.proto import inference_pb2
from tandem.proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    TandemError,
    Unavailable,
)
from tandem.router.api.service import GenerationService
from tandem.router.frontend.prepare import RequestContext
from tandem.router.frontend.served_model import ServedModel
from tandem.router.request import TokenDelta, TokenRequest
from tandem.tests.router.api.answers import request
from tandem.tests.router.fake_source import FakeTokenSource

LATE = DeadlineExceeded("late")
BEAMS: dict[str, Any] = {"n": 2, "beam_search": {"width": 3}, "stopping": {"max_tokens": 9}}
SAMPLES = BEAMS | {"beam_search": None}


class QueuedSource(FakeTokenSource):
    """Sends no request to a worker."""

    async def generate(
        self, request: TokenRequest, timeline: inference_pb2.Timeline, ended: Collection[int] = ()
    ) -> AsyncGenerator[TokenDelta, None]:
        try:
            async with aclosing(super().generate(request, timeline, ended)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            timeline.attempts = 0


async def read(
    model: ServedModel, source: FakeTokenSource, fields: dict[str, Any], charges: list[int]
) -> None:
    """Reads an answer; adds to `charges` what its caller is charged for it."""
    service = GenerationService([model], source)
    prepared = await service.accept(request(**fields), RequestContext(arrived=time.monotonic()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared.quota, "take_tokens", charges.append)
        async with aclosing(service.run(prepared, inference_pb2.Timeline())) as messages:
            async for _ in messages:
                pass


@pytest.mark.parametrize(
    ("kind", "error", "fields", "charged"),
    [
        (FakeTokenSource, None, BEAMS, 3 * 4),  # each beam as long as the longest hypothesis
        (FakeTokenSource, LATE, BEAMS, 3 * 9),
        (FakeTokenSource, Cancelled("does not read"), BEAMS, 3 * 9),
        (FakeTokenSource, Unavailable("no worker"), BEAMS, 0),
        (FakeTokenSource, InvalidArgument("too many states"), BEAMS, 0),
        (QueuedSource, LATE, BEAMS, 0),
        (FakeTokenSource, None, SAMPLES | {"n": 1, "best_of": 2}, 4 + 2),
        (FakeTokenSource, LATE, SAMPLES, 0),
    ],
)
async def test_tokens_that_may_have_been_computed_are_charged(
    model: ServedModel,
    kind: type[FakeTokenSource],
    error: TandemError | None,
    fields: dict[str, Any],
    charged: int,
) -> None:
    charges = list[int]()
    with suppress(TandemError):
        await read(model, kind(answers=(b"abcd", b"ef"), error=error), fields, charges)
    assert charges == [charged]


@pytest.mark.parametrize(("fields", "charged"), [(BEAMS, 3 * 9), (SAMPLES, 0)])
async def test_a_client_that_leaves_is_charged(
    model: ServedModel, fields: dict[str, Any], charged: int
) -> None:
    source = FakeTokenSource(stall_after=0)
    charges = list[int]()
    reading = asyncio.create_task(read(model, source, fields, charges))
    await source.wait_running(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert charges == [charged]
