"""Implements an executor without a model, whose KV cache encodes for every token the history it was
computed from.

For tests of everything above the model: it raises where a real model would silently continue from
another sequence's KV cache. Knows nothing of scheduling, tensors or networks.
"""

import functools
import hashlib
import itertools
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from mmap import mmap

from tandem.tests.workers.spans import Blocks, as_table
from tandem.workers.engine.plan import (
    PENDING_TOKEN,
    Executor,
    OnLayers,
    SampledLogprobs,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from tandem.workers.kv_cache.layout import KvLayout, KvSpan, LayerGeometry
from tandem.workers.kv_cache.store import Completed, KvRead
from tandem.workers.kv_cache.tables import TableSpec, table_of

NO_BLOCK = -1
"""Stands in a block table for a block that the sequence does not have."""

_histories: dict[bytes, bytes] = {}
"""The history that each computed cell comes from."""


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Returns the `count` tokens that a FakeExecutor generates after `prompt` in any batch, chunks
    and cache.
    """
    history = functools.reduce(_extend, prompt, b"")
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(_next_token(history, vocab_size, seed))
        history = _extend(history, tokens[-1])
    return tokens


def expected_choices(
    prompt: Sequence[int], n: int, count: int, vocab_size: int, seed: int = 0
) -> list[list[int]]:
    """Returns the expected tokens of `n` choices."""
    return [expected_tokens(prompt, count, vocab_size, seed + choice) for choice in range(n)]


def expected_logprobs(
    tokens: Sequence[int], top: int, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    """Returns the `top` likeliest tokens after `tokens`, with their log probabilities."""
    return _distribution(functools.reduce(_extend, tokens, b""), vocab_size)[:top]


class FakeKv:
    """KV cache memory in which each [2, heads, head_dim] cell of a token depends on its layer and
    its whole history.

    Implements `KvStore` for the whole model, whose KV slots are its KV heads. A block, token,
    layer, head, key or value in the wrong place shows as soon as `FakeExecutor` reads it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layout: KvLayout,
        tables: tuple[TableSpec, ...] = (),
    ) -> None:
        self.layout = layout
        self.tp, self.rank, self.shared_fd = 1, 0, None
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: tuple[TableSpec, ...] = (TableSpec(block_size=block_size),)
        self._cell_bytes = [
            part.num_kv_heads * part.slot_bytes
            for part in (
                layout.groups[group].part
                for group, _ in map(layout.place, range(layout.num_layers))
            )
        ]
        self.tables = tables or (TableSpec(block_size=block_size),)
        self.table_of = [
            table_of(self.tables, layout.groups[group])
            for group, _ in map(layout.place, range(layout.num_layers))
        ]
        self._cells = [
            [bytes(size)] * (num_blocks * self.tables[table].block_size)
            for size, table in zip(self._cell_bytes, self.table_of, strict=True)
        ]  # [layer][place]
        self._last_table = [0] * num_blocks  # that wrote to the block
        self._slots: dict[
            int, tuple[int, list[list[bytes]]]
        ] = {}  # in host memory: its last table, and of each layer the cells of a block

    def num_slots(self, group: int) -> int:
        """See `KvStore.num_slots`."""
        return self.layout.groups[group].part.num_kv_heads

    def attach(
        self, memory: mmap, *, num_blocks: int, block_size: int, tp: int, rank: int
    ) -> KvRead:
        """Raises ValueError: this memory cannot be mapped."""
        raise ValueError("not shared")

    def read(self, blocks: Blocks, span: KvSpan) -> Completed[memoryview]:
        """See `KvStore.read`."""
        places, slots = self._find(blocks, span)
        parts: list[bytes] = []
        for layer in self._layers(span):
            for first in (0, self._cell_bytes[layer] // 2):  # key, value
                parts += [
                    self._cells[layer][place][first + slots.start : first + slots.stop]
                    for place in places
                ]
        return Completed(memoryview(b"".join(parts)))

    def write(self, blocks: Blocks, span: KvSpan, data: memoryview) -> None:
        """See `KvStore.write`."""
        places, slots = self._find(blocks, span, writes=True)
        if data.nbytes != span.size(self.layout):
            raise ValueError(f"data: {data.nbytes} bytes, {span.size(self.layout)} are expected")
        raw, size = data.tobytes(), len(slots)
        at = 0
        for layer in self._layers(span):
            for first in (0, self._cell_bytes[layer] // 2):
                for place in places:
                    cell, start, stop = (
                        self._cells[layer][place],
                        first + slots.start,
                        first + slots.stop,
                    )
                    self._cells[layer][place] = cell[:start] + raw[at : at + size] + cell[stop:]
                    at += size

    def compute(
        self, tables: Sequence[Sequence[int]], start: int, tokens: Sequence[int], history: bytes
    ) -> bytes:
        """Stores the KV of `tokens` from position `start` on as a model would; returns the history
        with them. Each of `tables` has a block for each index, or NO_BLOCK.
        """
        places = [
            self._places(number, table, start, len(tokens), writes=True)
            for number, table in enumerate(tables)
        ]
        for position, token in enumerate(tokens):
            history = _extend(history, token)
            for layer, (cells, number) in enumerate(zip(self._cells, self.table_of, strict=True)):
                cell = _cell(history, token, layer, self._cell_bytes[layer])
                cells[places[number][position]] = cell
                _histories[cell] = history
        return history

    def copy(self, source: int, target: int) -> None:
        """Copies a whole block."""
        self._put(target, self._last_table[source], self._get(source))

    def save(self, block: int, slot: int) -> None:
        """Copies a whole block to host memory."""
        self._slots[slot] = self._last_table[block], self._get(block)

    def restore(self, slot: int, block: int) -> None:
        """Copies a whole block back. Raises KeyError if nothing was saved there."""
        self._put(block, *self._slots[slot])

    def _get(self, block: int) -> list[list[bytes]]:
        sizes = [self.tables[number].block_size for number in self.table_of]
        return [
            cells[block * size : (block + 1) * size]
            for cells, size in zip(self._cells, sizes, strict=True)
        ]

    def _put(self, block: int, table: int, parts: list[list[bytes]]) -> None:
        self._last_table[block] = table
        for cells, part in zip(self._cells, parts, strict=True):
            cells[block * len(part) : (block + 1) * len(part)] = part

    def history(self, blocks: Sequence[int], num_tokens: int) -> bytes:
        """Returns the history of the first num_tokens tokens in a full table, the only one."""
        return self.history_of([blocks], num_tokens)

    def history_of(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bytes:
        """Returns the history of the first num_tokens tokens. Raises RuntimeError if what a step
        sees of them is not one sequence's, in order.
        """
        ends = [b""] if not num_tokens else []
        for layer, number in enumerate(self.table_of):
            window = self.tables[number].window
            first = 0 if window is None else max(num_tokens - window + 1, 0)
            places = self._places(number, tables[number], first, num_tokens - first)
            history: bytes | None = None if first else b""
            for position, place in enumerate(places, start=first):
                cell = self._cells[layer][place]
                token = int.from_bytes(cell[:4], "little")
                history = _histories.get(cell) if history is None else _extend(history, token)
                if history is None or cell != _cell(history, token, layer, self._cell_bytes[layer]):
                    raise RuntimeError(
                        f"layer {layer}, position {position}, place {place}: KV of something else"
                    )
            if places:
                ends.append(history or b"")
        if len(set(ends)) != 1:
            raise RuntimeError(f"position {num_tokens}: tables of different sequences")
        return ends[0]

    def _layers(self, span: KvSpan) -> tuple[int, ...]:
        """Returns the numbers of the span's layers in the model."""
        return self.layout.groups[span.group].layers[span.first_layer : span.layers.stop]

    def _find(
        self, blocks: Blocks, span: KvSpan, *, writes: bool = False
    ) -> tuple[list[int], range]:
        """Returns the places of a span's tokens, and the bytes of its KV slots in either half of a
        cell.
        """
        slots = [group.part.num_kv_heads for group in self.layout.groups]
        own = as_table(blocks)
        number = table_of(self.tables, self.layout.groups[span.group])
        tokens = own.tokens(self.tables[number].block_size)
        span.check(self.layout, tokens=tokens, num_slots=slots)
        size = self.layout.groups[span.group].part.row_bytes
        first = span.first_token - tokens.start
        places = self._places(number, own.blocks, first, span.num_tokens, writes=writes)
        return places, range(span.first_slot * size, (span.first_slot + span.num_slots) * size)

    def _places(
        self,
        number: int,
        blocks: Sequence[int],
        first_token: int,
        num_tokens: int,
        *,
        writes: bool = False,
    ) -> list[int]:
        """Returns where the tokens are among a layer's cells. A block that another table has
        written to loses what it had.
        """
        size, end = self.tables[number].block_size, first_token + num_tokens
        if first_token < 0 or end > len(blocks) * size:
            raise ValueError(f"tokens {first_token} to {end} of {len(blocks)} blocks of {size}")
        used = blocks[first_token // size : -(-end // size)] if num_tokens else ()
        if NO_BLOCK in used:
            raise RuntimeError(f"tokens {first_token} to {end} of table {number}: no block there")
        for block in used:
            if writes and self._last_table[block] != number:
                for layer, own in enumerate(self.table_of):
                    count = self.tables[own].block_size
                    empty = [bytes(self._cell_bytes[layer])] * count
                    self._cells[layer][block * count : (block + 1) * count] = empty
                self._last_table[block] = number
        return [blocks[p // size] * size + p % size for p in range(first_token, end)]


class FakeExecutor(Executor):
    """Keeps block tables like a real rank and reads every earlier position of a sequence before it
    continues.

    The next token is a function of the previous tokens and the seed; log probabilities depend on
    the tokens alone, and a seed of 0 samples the likeliest token. `launch` computes at once;
    collecting takes `step_seconds`. Raises RuntimeError for a plan that a rank could not execute,
    for KV cache of another sequence, for a launch with two steps uncollected, for collecting out of
    order or twice, and after `fail_after_steps` steps, which may be set any time.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 512,
        model: str = "fake",
        step_seconds: float = 0.0,
        tables: tuple[TableSpec, ...] = (),
        num_states: int = 0,
    ) -> None:
        windows = [table.window for table in tables] or [None]
        layers = tuple(
            LayerGeometry(num_heads=2, num_kv_heads=2, head_dim=4, window=window)
            for window in (windows[0], *windows, windows[-1])
        )
        layout = KvLayout(layers=layers, dtype="float32", model=model)
        self.kv = FakeKv(num_blocks, block_size, layout, tables)
        self.vocab_size = vocab_size
        self.step_seconds = step_seconds
        self.fail_after_steps: int | None = None
        self.num_steps = 0
        self.num_tokens = 0  # computed in all steps
        # By slot, in device and in host memory: the history from which the state was computed.
        self.states: list[bytes | None] = [None] * num_states
        self.host_states: dict[int, bytes | None] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._sampling: dict[int, SamplingParams] = {}
        self._num_computed: dict[int, int] = {}
        self._sampled: dict[int, list[int]] = {}  # by sequence, in the last step
        self._uncollected: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        if len(self._uncollected) > 1:
            raise RuntimeError("a launch while two steps are uncollected")
        samples = self._compute(plan)
        if on_layers:
            for layer in range(1, self.kv.layout.num_layers):
                on_layers(layer)
        self._uncollected.append(plan)

        def collect() -> Samples:
            if not self._uncollected or self._uncollected[0] is not plan:
                raise RuntimeError("a step is collected out of order or twice")
            self._uncollected.popleft()
            time.sleep(self.step_seconds)  # also 0: other threads run during a step
            return samples

        return collect

    def _compute(self, plan: StepPlan) -> Samples:
        if self.fail_after_steps is not None and self.num_steps >= self.fail_after_steps:
            raise RuntimeError(f"the executor fails after {self.fail_after_steps} steps")
        for (
            sequence_id
        ) in plan.dropped:  # also unknown ids: imports that ended before their first step
            for known in (self._tables, self._sampling, self._num_computed, self._sampled):
                known.pop(sequence_id, None)
        if len(slots := {slot for _, slot in plan.saved}) < len(plan.saved):
            raise RuntimeError(f"of {len(plan.saved)} blocks only {len(slots)} have a slot")
        for block, slot in plan.saved:
            self.kv.save(block, slot)
        for slot, block in plan.loaded:
            self.kv.restore(slot, block)
        for slot, host in plan.saved_states:
            self.host_states[host] = self.states[slot]
        for host, slot in plan.loaded_states:
            self.states[slot] = self.host_states[host]
        sources = {source for source, _ in plan.copies}
        for source, target in plan.copies:
            if target in sources:
                raise RuntimeError(f"block {target} is copied and copied to")
            self.kv.copy(source, target)
        histories = [self._admit(step) for step in plan.sequences]
        self._check_states(plan, histories)
        # All are read before any is extended: no sequence of a step sees what the step computes for
        # another.
        samples, sampled = Samples(tokens=[]), dict[int, list[int]]()
        for step, history in zip(plan.sequences, histories, strict=True):
            if tokens := self._run(step, history, samples):
                sampled[step.sequence_id] = tokens
                samples.tokens.extend(tokens)
        if plan.sequences:
            self._sampled = sampled
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        return samples

    def _check_states(self, plan: StepPlan, histories: list[bytes]) -> None:
        """Raises RuntimeError unless each step reads the state of its own position, and no step
        writes to a slot that a step of the plan reads or that another one writes to.
        """
        states = [step.state for step in plan.sequences if step.state is not None]
        if len(states) != (len(plan.sequences) if self.states else 0):
            raise RuntimeError(f"{len(states)} steps with a state")
        read = {state.source for state in states}
        written = [slot for state in states for _, slot in state.targets]
        if read.intersection(written):
            raise RuntimeError(f"states {read.intersection(written)} are written in place")
        if len(written) != len(set(written)):
            raise RuntimeError(f"states {written}: two steps write to one slot")
        for step, history in zip(plan.sequences, histories, strict=True):
            if step.state is None:
                continue
            if (step.state.source is None) != (step.start == 0):
                raise RuntimeError(f"sequence {step.sequence_id}: position {step.start}: no state")
            if step.state.source is not None and self.states[step.state.source] != history:
                raise RuntimeError(
                    f"sequence {step.sequence_id}: a state of another position than {step.start}"
                )
            known = len(step.token_ids) - step.num_draft
            counts = [count for count, _ in step.state.targets]
            if (
                counts[-1] != len(step.token_ids)
                or sorted(set(counts)) != counts
                or (step.num_draft and counts != list(range(known, known + step.num_draft + 1)))
            ):
                raise RuntimeError(f"sequence {step.sequence_id}: states after {counts} tokens")

    def _write_states(self, step: SequenceStep, tokens: Sequence[int], history: bytes) -> None:
        if step.state is None:
            return
        ends = list(itertools.accumulate(tokens, _extend, initial=history))
        for count, slot in step.state.targets:
            self.states[slot] = ends[count]

    def _admit(self, step: SequenceStep) -> bytes:
        """Extends the sequence's block table; returns the history before the step."""
        number = step.sequence_id
        if step.sampling is not None:
            self._tables[number] = [[] for _ in self.kv.tables]
            self._sampling[number] = step.sampling
            self._num_computed[number] = step.start
            if bool(step.history) != step.sampling.needs_history:
                raise RuntimeError(f"sequence {number}: history is missing or superfluous")
        if number not in self._tables or not step.token_ids:
            raise RuntimeError(f"sequence {number}: sampling or tokens are missing")
        if step.start != self._num_computed[number]:
            raise RuntimeError(
                f"sequence {number}: position {step.start} after a gap or a repetition"
            )
        for table, new in zip(self._tables[number], step.new_blocks, strict=False):
            if new.first < len(table):
                raise RuntimeError(f"sequence {number}: block {new.first} of a table comes twice")
            table += [NO_BLOCK] * (new.first - len(table))
            table += new.blocks
        return self.kv.history_of(self._tables[number], step.start)

    def _run(self, step: SequenceStep, history: bytes, samples: Samples) -> list[int]:
        """Returns the step's samples, and adds its log probabilities to `samples`."""
        number, tokens, sampling = (
            step.sequence_id,
            self._known(step),
            self._sampling[step.sequence_id],
        )
        if step.num_draft:
            return self._verify(step, history, samples)
        if sampling.prompt_logprobs is not None:
            following = tokens[1:] + (
                () if step.next_prompt_token is None else (step.next_prompt_token,)
            )
            ends = itertools.accumulate(tokens, _extend, initial=history)
            scored = zip(itertools.islice(ends, 1, None), following, strict=False)
            scores = [
                _score(end, token, self.vocab_size, sampling.prompt_logprobs)
                for end, token in scored
            ]
            samples.prompt_logprobs[number] = scores
        self._write_states(step, tokens, history)
        history = self.kv.compute(self._tables[number], step.start, tokens, history)
        self._num_computed[number] = step.start + len(tokens)
        sampled = [
            _next_token(history, self.vocab_size, sampling.seed + i)
            for i in range(step.num_samples)
        ]
        if sampled and sampling.logprobs is not None:
            samples.logprobs[number] = [
                _score(history, token, self.vocab_size, sampling.logprobs) for token in sampled
            ]
        return sampled

    def _verify(self, step: SequenceStep, history: bytes, samples: Samples) -> list[int]:
        """Returns what follows the step's first token and those of its draft that are right, then
        nonsense; adds log probabilities. The next step begins after the tokens that are right.
        """
        number, tokens, sampling = (
            step.sequence_id,
            step.token_ids,
            self._sampling[step.sequence_id],
        )
        if len(tokens) != 1 + step.num_draft or step.num_samples != len(tokens):
            raise RuntimeError(
                f"sequence {number}: a draft of {step.num_draft} in {len(tokens)} tokens"
            )
        ends = list(itertools.accumulate(tokens, _extend, initial=history))[1:]
        sampled = [_next_token(end, self.vocab_size, sampling.seed) for end in ends]
        if sampling.logprobs is not None:
            scored = zip(ends, sampled, strict=True)
            samples.logprobs[number] = [
                _score(end, token, self.vocab_size, sampling.logprobs) for end, token in scored
            ]
        self._write_states(step, tokens, history)
        self.kv.compute(self._tables[number], step.start, tokens, history)
        is_right = [guess == token for guess, token in zip(tokens[1:], sampled, strict=False)]
        num_valid = 1 + [*is_right, False].index(False)
        self._num_computed[number] = step.start + num_valid
        return sampled[:num_valid] + [-1] * (len(sampled) - num_valid)

    def _known(self, step: SequenceStep) -> tuple[int, ...]:
        """Returns the step's tokens, with the last step's sample of this sequence in place of
        PENDING_TOKEN.
        """
        if PENDING_TOKEN not in step.token_ids:
            return step.token_ids
        if len(step.token_ids) > 1 or len(self._sampled.get(step.sequence_id, ())) != 1:
            raise RuntimeError(
                f"sequence {step.sequence_id}: a pending token that the previous step has not "
                "sampled"
            )
        return (self._sampled[step.sequence_id][0],)


@functools.lru_cache(maxsize=2**16)
def _extend(history: bytes, token: int) -> bytes:
    return hashlib.blake2b(history + token.to_bytes(4, "little"), digest_size=16).digest()


@functools.lru_cache(maxsize=2**16)
def _cell(history: bytes, token: int, layer: int, num_bytes: int) -> bytes:
    """Returns the token in the first four bytes, then float32 that are whole numbers below 256."""
    noise = hashlib.shake_128(history + bytes([layer])).digest(num_bytes // 4 - 1)
    return token.to_bytes(4, "little") + array("f", list(noise)).tobytes()


def _next_token(history: bytes, vocab_size: int, seed: int) -> int:
    """Returns the token after a history; a seed of 0 reads the history itself."""
    if seed % 2**64:
        history = hashlib.blake2b(
            history + (seed % 2**64).to_bytes(8, "little"), digest_size=4
        ).digest()
    return int.from_bytes(history[:4], "little") % vocab_size


@functools.lru_cache(maxsize=2**12)
def _distribution(history: bytes, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Returns every token with its log probability, the likeliest first, which is the one that seed
    0 samples.
    """
    noise = array("H", hashlib.shake_128(history + b"logits").digest(2 * vocab_size))
    logits = [value / 2**14 for value in noise]
    first = _next_token(history, vocab_size, 0)
    highest = max(range(vocab_size), key=logits.__getitem__)
    logits[first], logits[highest] = logits[highest], logits[first]
    total = math.log(sum(map(math.exp, logits)))
    logprobs = array("f", [logit - total for logit in logits])
    return tuple(sorted(enumerate(logprobs), key=lambda item: (-item[1], item[0] != first)))


def _score(history: bytes, token: int, vocab_size: int, top: int) -> SampledLogprobs:
    ranked = _distribution(history, vocab_size)  # [vocab_size]
    return SampledLogprobs(
        logprob=next(score for other, score in ranked if other == token), top=ranked[:top]
    )
