"""Block tables of sliding windows: how many blocks sequences hold, and what later prompts find."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.hashing import hash_chain
from tandem.tests.workers.engine.drive import cached_of, expected, run, spec, tokens_of
from tandem.tests.workers.engine.harness import FakeDisk, Worker, engine_config
from tandem.tests.workers.engine.null import NullExecutor
from tandem.workers.engine.block_pool import BlockState
from tandem.workers.engine.block_table import SequenceTable, block_name, window_first
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.resume import ResumePoints
from tandem.workers.engine.sequence import Task
from tandem.workers.kv_cache.layout import KvLayout, LayerGeometry
from tandem.workers.kv_cache.tables import TableSpec, alignment, plan_tables

FULL = LayerGeometry(num_heads=1, num_kv_heads=1, head_dim=8)
GEMMA = plan_tables(
    KvLayout(layers=(FULL, *[replace(FULL, window=1024)] * 5), dtype="float32", model="tiny"), 16
)
"""One full layer of six, as in Gemma 3."""


def run_null(engine: Engine, tokens: Sequence[int], number: int, **fields: Any) -> tuple[int, int]:
    """Runs a prompt; returns its cached tokens and the most blocks that are held meanwhile."""
    engine.submit(replace(spec(number, tuple(tokens)), **{"max_tokens": 2} | fields))
    cached = most = 0
    while engine.has_work:
        for event in engine.step():
            cached += getattr(event, "num_cached", 0)
        blocks = engine.blocks()
        most = max(most, blocks[BlockState.OWNED] + blocks[BlockState.RESERVED])
    engine.check_integrity()
    return cached, most


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_runs_in_a_quarter_of_the_bytes_of_full_layers(overlap: bool) -> None:
    num_tokens = 65_536
    assert [(table.window, table.block_size) for table in GEMMA] == [(None, 80), (1024, 16)]
    # A token of a full layer takes 1 unit: a block of 16 tokens of 6 layers takes 96, and of these
    # tables 80.
    bytes_of_full_layers = num_tokens // 16 * 96
    num_blocks = bytes_of_full_layers // 4 // 80
    config = engine_config(
        num_blocks=num_blocks, tables=GEMMA, overlap=overlap, chunk_tokens=512, growth_tokens=256
    )
    engine = Engine(NullExecutor(), config)
    tokens = range(num_tokens - 300)
    _, most = run_null(engine, tokens, 1, max_tokens=300)
    assert most <= num_blocks
    assert most < -(-num_tokens // 80) + 220, "the windows hold few blocks"
    cached, _ = run_null(engine, tokens, 2)
    assert cached == (num_tokens - 301) // 80 * 80, "the whole prompt is found again"


@pytest.mark.parametrize("length", [1500, 1600])
def test_from_the_third_on_prompts_with_a_common_start_take_it_from_the_cache(length: int) -> None:
    config = engine_config(num_blocks=4000, tables=GEMMA)
    engine = Engine(NullExecutor(), config)
    common = list(range(length))
    for number in range(64):
        rng = random.Random(number)
        ends = [rng.randrange(10_000, 1_000_000) for _ in range(2200 - length)]
        cached, _ = run_null(engine, common + ends, 1 + 10 * number)
        if number >= 2:
            assert cached == length // 80 * 80


def test_the_capacity_is_the_longest_prompt_that_fits() -> None:
    config = engine_config(num_blocks=1228, tables=GEMMA, chunk_tokens=512)
    engine = Engine(NullExecutor(), config)
    longest = config.capacity_tokens
    assert longest > 65_536
    engine.submit(replace(spec(1, tuple(range(longest))), task=Task.PREFILL))
    with pytest.raises(ValueError, match=f"exceed the capacity of {longest} tokens"):
        engine.submit(replace(spec(2, tuple(range(longest + 80))), task=Task.PREFILL))


def test_no_disk_beside_windows() -> None:
    with pytest.raises(ValueError, match="kv_disk: needs a model without windows"):
        Engine(NullExecutor(), engine_config(num_blocks=9, tables=GEMMA), source=FakeDisk())


def test_a_decoding_sequence_holds_its_window_and_no_more() -> None:
    target = Worker(
        engine_config(
            num_blocks=40,
            block_size=2,
            growth_tokens=0,
            chunk_tokens=4,
            tables=(TableSpec(block_size=4), TableSpec(block_size=2, window=6)),
        )
    )
    target.submit(spec(1, tuple(range(1, 30)), max_tokens=20))
    held: list[int] = []
    events = []
    while target.engine.has_work:
        events += target.step()
        if 1 in target.sequences:
            held.append(len(target.sequences[1].tables[1].blocks))
    assert tokens_of(events, 1) == expected(tuple(range(1, 30)), 20)
    # 6 tokens before the last point, up to 4 since then, and the block that the next token enters.
    assert max(held[8:]) <= 6
    assert max(held) <= 8
    target.check_idle()


def test_the_next_turn_finds_all_but_the_last_tokens() -> None:
    target = Worker(
        engine_config(
            num_blocks=60,
            block_size=2,
            tables=(TableSpec(block_size=4), TableSpec(block_size=2, window=6)),
        )
    )
    prompt = tuple(range(1, 30))
    target.submit(spec(1, prompt, max_tokens=20))
    turn = (*prompt, *tokens_of(run(target), 1), 5, 6, 7)
    target.submit(spec(2, turn))
    events = run(target)
    assert cached_of(events, 2) == 48, "48 of 29 + 20 - 1 tokens with KV cache"
    assert tokens_of(events, 2) == expected(turn, 4)
    target.check_idle()


TABLES = st.lists(
    st.tuples(st.none() | st.integers(1, 9), st.integers(1, 4)),
    min_size=1,
    max_size=3,
    unique_by=lambda table: table[0],
).map(
    lambda tables: tuple(
        TableSpec(block_size=2 * ratio, window=window)
        for window, ratio in sorted(tables, key=lambda table: (table[0] is not None, table[0] or 0))
    )
)


@given(tables=TABLES, num_tokens=st.integers(1, 60), data=st.data())
def test_a_hit_is_one_whole_point_and_the_longest(
    tables: tuple[TableSpec, ...], num_tokens: int, data: st.DataObject
) -> None:
    """Against a model that looks at every position and every token that its next token sees."""
    chain = hash_chain(range(num_tokens), 2)
    step = alignment(tables)
    names = [
        block_name(chain[(index + 1) * table.block_size // 2 - 1], number)
        for number, table in enumerate(tables)
        for index in range(len(chain) * 2 // table.block_size)
    ]
    gone = set(data.draw(st.lists(st.sampled_from(names), max_size=3))) if names else set()
    num_states = data.draw(st.integers(0, 1))
    has_state = set(data.draw(st.lists(st.sampled_from(chain), max_size=9))) if chain else set()
    is_fetched = data.draw(st.booleans())

    def is_whole(position: int) -> bool:
        for number, table in enumerate(tables):
            for token in range(position):
                end = num_tokens if is_fetched else position
                if table.window is not None and token <= end - table.window:
                    continue
                last = (token // table.block_size + 1) * table.block_size
                if block_name(chain[last // 2 - 1], number) in gone:
                    return False
        return is_fetched or not num_states or chain[position // 2 - 1] in has_state

    config = engine_config(num_blocks=1, block_size=2, tables=tables)
    points = ResumePoints(replace(config, num_states=num_states))
    hit = points.longest(
        chain,
        lambda name: name not in gone,
        has_state.__contains__,
        fetched=num_tokens if is_fetched else None,
    )
    wanted = max(p for p in range(0, len(chain) * 2 + 1, step) if p == 0 or is_whole(p))
    if any(names for _, names in hit.parts):
        assert hit.num_tokens == wanted
    assert hit.num_tokens in (0, wanted)
    for (first, parts), table in zip(hit.parts, tables, strict=True):
        end = num_tokens if is_fetched else hit.num_tokens
        start = 0 if table.window is None else max(end - table.window + 1, 0)
        assert first == start // table.block_size
        if parts:
            assert (first + len(parts)) * table.block_size == hit.num_tokens
        assert not gone & set(parts)


@given(
    tables=TABLES,
    num_tokens=st.integers(1, 200),
    end=st.integers(0, 200),
    num_blocks=st.integers(0, 60),
)
def test_the_last_point_that_fits_is_found(
    tables: tuple[TableSpec, ...], num_tokens: int, end: int, num_blocks: int
) -> None:
    """Against a model that counts the blocks of every point."""
    points = ResumePoints(engine_config(num_blocks=1, block_size=2, tables=tables))

    def count(position: int) -> int:
        return sum(
            table.window is None or (index + 1) * table.block_size > position - table.window + 1
            for table in tables
            for index in range(position // table.block_size)
        )

    possible = range(0, min(end, num_tokens - 1) + 1, alignment(tables))
    fitting = [position for position in possible if count(position) <= num_blocks]
    assert points.last_within(num_tokens, end, num_blocks) == fitting[-1]


@given(
    size=st.integers(1, 4),
    window=st.integers(1, 12),
    step=st.integers(1, 3),
    points=st.lists(st.integers(1, 60), max_size=4, unique=True).map(sorted),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_a_table_holds_what_each_position_sees(
    size: int, window: int, step: int, points: list[int], steps: list[int]
) -> None:
    """Against a list of all blocks."""
    table = SequenceTable(TableSpec(block_size=size, window=window), 0)
    everything: list[int] = []
    position = 0
    for count in steps:
        left = table.slide(window_first(table.spec, position, step * size))
        assert left == everything[table.first - len(left) : table.first]
        new = list(range(len(everything), -(-(position + count) // size)))
        everything += new
        table.blocks += new
        start = max(position - window + 1, 0) // size
        assert table.first <= start
        assert table.blocks[start - table.first :] == everything[start:]
        resume = position - position % (step * size)
        assert table.first == max(resume - window + 1, 0) // size, "no more than a resume needs"
        position += count
    for index in range(len(everything)):
        needed = {
            point
            for point in points
            if any(token // size == index for token in range(max(point - window + 1, 0), point))
        }
        assert table.serves(index, points) == bool(needed)
