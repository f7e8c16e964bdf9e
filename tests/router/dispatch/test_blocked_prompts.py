"""What routers tell each other of prompts that crash workers: with clocks that differ, late, again
and again.
"""

import random
from typing import Any

import pytest

from tandem.proto import inference_pb2
from tandem.router.dispatch.blocked_prompts import (
    BLOCKED_SECONDS,
    LEAST_SHARED_SECONDS,
    MAX_BLOCKED,
    BlockedPrompts,
    hash_request,
)
from tandem.router.request import LoraAdapter
from tandem.tests.router.pools import Clock, request
from tandem.tests.token_request import changed

REQUEST = request((5, 6, 7))
OTHER = LoraAdapter(name="other", folder="/adapters", fingerprint=bytes(16))
DIFFERENT: dict[str, dict[str, Any]] = {
    "prompt": {"token_ids": (5, 6)},
    "tenant": {"tenant": "ada"},
    "prefixes of others": {"cache_salt": b"ada"},
    "adapter": {"adapter": OTHER},
    "max_tokens": {"max_tokens": 9},
    "temperature": {"sampling": inference_pb2.SamplingParams(temperature=0.5)},
    "grammar": {"grammar": 'start: "a"'},
    "choices": {"num_choices": 2},
    "beam search": {"beam_search": inference_pb2.BeamSearch(width=2)},
    "stop tokens": {"stop_token_ids": (3,)},
    "log probabilities": {"logprobs": 0},
}


@pytest.mark.parametrize("fields", DIFFERENT.values(), ids=list(DIFFERENT))
def test_a_request_of_another_tenant_adapter_or_parameter_is_not_refused(
    fields: dict[str, Any],
) -> None:
    blocked_prompts = BlockedPrompts()
    blocked_prompts.block(REQUEST)
    assert blocked_prompts.is_blocked(REQUEST)
    assert not blocked_prompts.is_blocked(changed(REQUEST, **fields))


def test_the_same_request_is_refused_again_whatever_its_seed_and_its_time() -> None:
    again = changed(
        REQUEST,
        request_id="again",
        sampling=inference_pb2.SamplingParams(seed=7),
        arrived=5.0,
        deadline=9.0,
        priority=1,
    )
    assert hash_request(again) == hash_request(REQUEST)


def test_the_seconds_that_are_left_are_shared_whatever_the_clocks_say() -> None:
    one_clock, other_clock = Clock(), Clock()
    other_clock.now = 1e6
    one, other = BlockedPrompts(one_clock), BlockedPrompts(other_clock)
    one.block(REQUEST)
    one_clock.now += 100
    assert other.learn(one.remaining())
    assert other.is_blocked(REQUEST)
    assert not other.is_blocked(changed(REQUEST, token_ids=(5, 6)))
    other_clock.now += BLOCKED_SECONDS - 101
    assert other.is_blocked(REQUEST)
    other_clock.now += 1
    assert not other.is_blocked(REQUEST)


def test_what_is_known_is_no_news_and_not_prolonged() -> None:
    clock = Clock()
    one, other = BlockedPrompts(clock), BlockedPrompts(clock)
    one.block(REQUEST)
    told = one.remaining()
    assert other.learn(told)
    clock.now += 10
    assert not other.learn(told)
    assert other.remaining() == one.remaining()
    clock.now += BLOCKED_SECONDS - 10
    assert not one.is_blocked(REQUEST)
    assert not other.is_blocked(REQUEST)


def test_messages_that_are_late_keep_no_block_alive() -> None:
    """A directory and three routers, one of which joins late; no message takes longer than a call's
    deadline.
    """
    clock, chance = Clock(), random.Random(1)
    directory, *routers = holders = [BlockedPrompts(clock) for _ in range(4)]
    routers[0].block(REQUEST)
    late: list[tuple[float, BlockedPrompts, dict[bytes, float]]] = []
    while clock.now < BLOCKED_SECONDS + 3 * LEAST_SHARED_SECONDS:
        clock.now += 0.5
        for router in routers if clock.now > 300 else routers[:2]:
            sender, receiver = (router, directory) if chance.random() < 0.5 else (directory, router)
            late.append((clock.now + chance.uniform(0, 5), receiver, sender.remaining()))
        for entry in [entry for entry in late if entry[0] <= clock.now]:
            late.remove(entry)
            entry[1].learn(entry[2])
        if 310 < clock.now < BLOCKED_SECONDS:
            assert all(each.is_blocked(REQUEST) for each in holders)
        if clock.now > BLOCKED_SECONDS + LEAST_SHARED_SECONDS:
            assert not any(each.is_blocked(REQUEST) for each in holders)


def test_they_are_bounded_in_number() -> None:
    clock = Clock()
    one, other = BlockedPrompts(clock), BlockedPrompts(clock)
    for number in range(MAX_BLOCKED + 1):
        one.block(request((number,)))
    assert not one.is_blocked(request((0,)))
    assert one.is_blocked(request((MAX_BLOCKED,)))
    other.block(request((0,)))
    assert other.learn(one.remaining())
    assert len(other.remaining()) == MAX_BLOCKED
    assert not other.learn(one.remaining()), (
        "what has no room is no news, or both would exchange it for ever"
    )
    clock.now += BLOCKED_SECONDS
    assert not one.remaining()
    assert not other.learn({})


def test_each_block_is_announced_and_what_is_learned_is_not() -> None:
    one, other, announced = BlockedPrompts(), BlockedPrompts(), list[str]()
    one.on_news = lambda: announced.append("one")
    other.on_news = lambda: announced.append("other")
    one.block(REQUEST)
    other.learn(one.remaining())
    assert announced == ["one"]
