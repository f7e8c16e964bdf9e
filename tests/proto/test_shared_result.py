"""Results that are computed once for all who ask at about the same time."""

import asyncio
import time

import pytest

from tandem.proto.shared_result import SharedResult


async def test_who_asks_at_the_same_time_gets_the_same() -> None:
    begun: list[None] = []
    go_on = asyncio.Event()

    async def compute() -> int:
        begun.append(None)
        await go_on.wait()
        return len(begun)

    shared = SharedResult(compute, seconds=3_600)
    asked = [asyncio.create_task(shared.get()) for _ in range(100)]
    await asyncio.sleep(0)
    asked[0].cancel()
    go_on.set()
    assert set(await asyncio.gather(*asked[1:])) == {1}
    assert await shared.get() == 1


async def test_computing_takes_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = 0.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def compute() -> None:
        nonlocal now, spent
        now, spent = now + 0.01, spent + 0.01

    shared = SharedResult(compute, share=0.02)
    for _ in range(10_000):
        await shared.get()
        now += 0.001
    assert spent <= 0.021 * now
    assert spent >= 0.019 * now


async def test_an_error_reaches_who_asks_and_the_next_one_tries_again() -> None:
    answers = iter([ValueError("no"), None])

    async def compute() -> str:
        if (answer := next(answers)) is not None:
            raise answer
        return "yes"

    shared = SharedResult(compute)
    with pytest.raises(ValueError, match="no"):
        await shared.get()
    assert await shared.get() == "yes"
