"""Requests through real workers, sessions and KV transfers, with an executor that checks every byte of KV cache."""

import pytest

from tandem.tests.fleet import VOCAB, fleet, token_request
from tandem.workers.engine.fake import expected_tokens


@pytest.mark.parametrize("prefill", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 700])
async def test_tokens_equal_the_reference(prefill: int, length: int) -> None:
    prompt = [(7 * i + length) % VOCAB for i in range(length)]
    async with fleet(prefill, 1, chunk_tokens=64) as running:
        for _ in range(2):  # the second time from the prefix caches
            tokens, timeline = await running.generate(token_request(prompt, 40))
            assert tokens == expected_tokens(prompt, 40, VOCAB)
        if prefill:
            assert timeline.kv_transfer_bytes == length % 16 * 3 * 64  # the whole blocks were there already


async def test_the_timeline_adds_up() -> None:
    async with fleet(1, 1) as running:
        tokens, timeline = await running.generate(token_request(range(300), 20))
    parts = (
        timeline.tokenize_seconds
        + timeline.queue_seconds
        + timeline.dispatch_seconds
        + timeline.prefill_seconds
        + timeline.kv_transfer_seconds
        + timeline.decode_seconds
    )
    assert parts == pytest.approx(timeline.end_to_end_seconds, rel=0.05)
    assert min(timeline.queue_seconds, timeline.dispatch_seconds, timeline.kv_transfer_seconds) >= 0
    assert timeline.completion_tokens == len(tokens) == 20
    assert timeline.attempts == 1
    assert timeline.kv_transfer_bytes == 300 * 3 * 64
