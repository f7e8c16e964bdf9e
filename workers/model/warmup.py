"""Builds the steps of a warm-up: typical ones, and the largest that the budgets of an engine allow.

They need the first blocks of a KV cache, whose contents they overwrite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...proto.limits import MAX_LOGPROBS
from ..engine.config import default_chunk_tokens
from ..engine.plan import SamplingParams, SequenceStep, StatePlan, StepPlan
from ..kv_cache.tables import TableBlocks, TableSpec

_TYPICAL: Final = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=2, top_p=0.9, min_p=0.01),
)
_LARGEST: Final = (
    SamplingParams(top_p=0.9),
    SamplingParams(
        top_p=0.9,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias=((0, 1.0),),
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Holds the maximum of tokens in a step, and of rows of logits, each of another sequence."""

    num_tokens: int = default_chunk_tokens("cuda")
    num_rows: int = 256

    def num_blocks(self, block_size: int) -> int:
        """Returns the number of blocks that the largest steps need."""
        return -(-self.num_tokens // block_size)


def typical_steps(
    num_tokens: int, tables: Sequence[TableSpec], *, with_filters: bool, with_state: bool = False
) -> Iterator[StepPlan]:
    """Yields steps of one sequence: a prompt of `num_tokens`, and a single token.

    Single tokens use other kernels than prompts. Filters of sampling are compiled on GPUs only. A
    model with state needs a slot.
    """
    for sampling in _TYPICAL if with_filters else _TYPICAL[:2]:
        for count in (num_tokens, 1):
            step = _step(-1, count, tables, sampling)
            if with_state:
                step = replace(step, state=StatePlan(None, ((count, 0),)))
            yield StepPlan(sequences=(step,), dropped=())
    yield StepPlan(sequences=(), dropped=(-1,))


def largest_steps(
    limits: StepLimits, context_tokens: int, tables: Sequence[TableSpec]
) -> Iterator[StepPlan]:
    """Yields steps that need the most memory: `num_rows` prompts of `num_tokens` together.

    Every prompt ends and samples, with filters alone, and with penalties and log probabilities
    besides. After that each sequence has a single token. The first prompts have most of the tokens,
    at most `context_tokens` each. All share the same blocks: their contents do not matter.
    """
    ids = range(-limits.num_rows, 0)
    lengths = _prompt_lengths(limits, context_tokens)
    for sampling in _LARGEST:
        for counts in (lengths, [1] * len(ids)):
            steps = zip(ids, counts, strict=True)
            sequences = tuple(_step(number, count, tables, sampling) for number, count in steps)
            yield StepPlan(sequences=sequences, dropped=())
    yield StepPlan(sequences=(), dropped=tuple(ids))


def _prompt_lengths(limits: StepLimits, context_tokens: int) -> list[int]:
    """Returns the lengths of `num_rows` prompts of `num_tokens` together, the longest ones first.

    The sum is smaller if so many prompts of `context_tokens` have fewer tokens, and larger if there
    is less than one token for each.
    """
    left = max(0, limits.num_tokens - limits.num_rows)  # beside the first token of each
    lengths = []
    for _ in range(limits.num_rows):
        others = min(left, context_tokens - 1)
        lengths.append(1 + others)
        left -= others
    return lengths


def _step(
    sequence_id: int, num_tokens: int, tables: Sequence[TableSpec], sampling: SamplingParams
) -> SequenceStep:
    """Returns the step of a prompt of `num_tokens` in the first blocks, which all tables share."""
    tokens = (0,) * num_tokens
    return SequenceStep(
        sequence_id=sequence_id,
        token_ids=tokens,
        start=0,
        new_blocks=tuple(
            TableBlocks(tuple(range(-(-num_tokens // table.block_size)))) for table in tables
        ),
        sampling=sampling,
        num_samples=1,
        history=tokens if sampling.needs_history else (),
        num_prompt=num_tokens,
    )
