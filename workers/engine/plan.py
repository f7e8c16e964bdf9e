"""Defines the plan of a step, its samples, and the interface of executors.

Knows nothing of tensors, devices or networks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol

from ..kv_cache.tables import TableBlocks

Pooling = Literal["last", "mean"]
"""The embedding of a prompt: its last token's hidden state after the last norm, or their mean."""

NOT_FINITE: Final = "the model's output is not finite"
"""The reason in `Samples.failed` if the model computed NaN or infinity for a sequence."""

PENDING_TOKEN: Final = -1
"""Stands in a plan for the token that the sequence's previous step samples.

Its id is not known yet. Between these two steps there are only steps without sequences.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Describes a watermark in sampled tokens (Kirchenbauer et al., arXiv 2301.10226).

    A keyed hash of the previous tokens divides the vocabulary into green and other tokens, and
    `delta` is added to the logits of the green ones.
    """

    key: bytes = field(repr=False)  # secret, WATERMARK_KEY_BYTES
    gamma: float  # the share of green tokens
    delta: float
    context_width: int  # the number of previous tokens, at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Holds the sampling parameters of a sequence.

    The noise is keyed by (seed, position), so it does not depend on the batch.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0  # 64 bits
    repetition_penalty: float = 1.0  # for tokens of prompt and completion
    presence_penalty: float = 0.0  # for tokens of the completion
    frequency_penalty: float = 0.0  # for tokens of the completion
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and the bias added to their logits
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    watermark: Watermark | None = None
    # Excluded until the sequence has min_length tokens; empty without min_length.
    stop_ids: tuple[int, ...] = ()
    min_length: int = 0
    grammar: str = ""  # of the completion, in llguidance's format
    grammar_owner: bytes = b""  # sequences of one owner share compiled grammars
    # The number of top alternatives to report for each sampled token; None reports nothing.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for each prompt token
    # Report `logprobs` of the distribution that tokens are drawn from, not of the model's own.
    processed_logprobs: bool = False
    pooling: Pooling | None = None  # which embedding of the prompt to report with the first sample

    @property
    def needs_history(self) -> bool:
        """Returns True if sampling needs the previous tokens in addition to the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.bad_words)
            or bool(self.grammar)
            or self.watermark is not None
        )


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Names the slots from which a step reads a sequence's state, and those to which it writes it.

    No step writes to a slot that it reads.
    """

    source: int | None  # with the state before the step; None: the sequence begins
    # (number of the step's tokens, slot) pairs, ascending: after so many tokens the state is
    # written to the slot. The last pair is for all tokens. The others are for resume points, and
    # for draft tokens that may be the last right one.
    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """Holds one sequence's part of a step.

    The ranks keep the block tables, so a step has only the new blocks. A step with `sampling`
    registers the sequence, or replaces it; then its block tables consist of `new_blocks` alone.
    """

    sequence_id: int
    # The tokens whose KV this step computes, at least one; or PENDING_TOKEN alone.
    token_ids: tuple[int, ...]
    # The position of token_ids[0]; every earlier position has its KV in the block tables, except
    # positions that have left the window of a table.
    start: int
    # For each table of `EngineConfig.tables`, the blocks that the table has from index `first` on
    # before the step; empty if no table has a new block. No token that the step reads is in a block
    # between the end of a rank's table and `first`.
    new_blocks: tuple[TableBlocks, ...]
    sampling: SamplingParams | None  # set in the sequence's first step on this worker, then None
    num_samples: int  # tokens sampled to follow token_ids[-1]; the i-th with `sampling.seed` + i
    # The number of draft tokens at the end of token_ids. One token is sampled after the token
    # before the draft and one after each draft token: num_draft + 1 samples, all with
    # `sampling.seed`.
    num_draft: int = 0
    # All known tokens of the sequence, with a `sampling` that needs them.
    history: tuple[int, ...] = ()
    num_prompt: int = 0  # prompt tokens in the history
    # With `sampling`: the number of the sequence's loaded adapter; 0 means no adapter.
    adapter: int = 0
    # The prompt token after token_ids[-1], if `prompt_logprobs` are requested.
    next_prompt_token: int | None = None
    state: StatePlan | None = None  # only for a model that keeps state

    def each_sample(self) -> "Iterable[SequenceStep]":
        """Returns one step for each sample; each has one draft token more than the one before."""
        if not self.num_draft:
            return (self,)
        known = len(self.token_ids) - self.num_draft
        return [
            replace(self, token_ids=self.token_ids[: known + n], num_samples=1, num_draft=n)
            for n in range(self.num_draft + 1)
        ]

    @property
    def draft(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_draft :]

    def num_accepted(self, samples: Sequence[int]) -> int:
        """Returns the number of draft tokens that the step's samples confirm.

        The sample after these tokens is valid as well.
        """
        pairs = zip(self.draft, samples, strict=False)
        return next(
            (index for index, (guess, token) in enumerate(pairs) if guess != token), self.num_draft
        )


class CpuShare(NamedTuple):
    """Holds the share of the CPUs that the steps of a worker take."""

    nice: int = 0  # added to the process's niceness
    num_threads: int = 0  # of each rank; 0: as at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Describes one step of a worker."""

    sequences: tuple[SequenceStep, ...]
    dropped: tuple[int, ...]  # sequence ids to forget before this step
    # (source, target) blocks that are copied before this step; no target is a source.
    copies: tuple[tuple[int, int], ...] = ()
    unloaded: tuple[int, ...] = ()  # adapters that no further step names
    # Copies to and from host memory before this step and its `copies`: first the (block, host
    # block) pairs of `saved`, no host block twice, then the (host block, block) pairs of `loaded`.
    saved: tuple[tuple[int, int], ...] = ()
    loaded: tuple[tuple[int, int], ...] = ()
    # The same for slots of states.
    saved_states: tuple[tuple[int, int], ...] = ()
    loaded_states: tuple[tuple[int, int], ...] = ()
    # A stream that was interrupted elsewhere is stalled until this step is done.
    is_expedited: bool = False
    share: CpuShare | None = None  # of this step and later ones; None: unchanged

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens whose KV the step computes."""
        return sum(len(step.token_ids) for step in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of tokens in chunks of more than one token, without drafts."""
        return sum(
            len(step.token_ids)
            for step in self.sequences
            if len(step.token_ids) > 1 + step.num_draft
        )

    @property
    def has_decodes(self) -> bool:
        """Returns True if the step decodes a sequence; decodes come first in `sequences`."""
        first = self.sequences[0] if self.sequences else None
        if first is None:
            return False
        return (
            first.start > 0
            and len(first.token_ids) == 1 + first.num_draft
            and first.num_samples > 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprobs:
    """Holds float32 log probabilities of a token's position, as natural logarithms.

    They describe the model's own distribution, before temperature, penalties, watermark, filters
    and masks.
    """

    logprob: float  # of the token itself
    rank: int = 0  # 1 plus the number of likelier tokens; 0: not counted
    # The likeliest token ids with their log probabilities, the likeliest first.
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Holds the sampled tokens of a step."""

    # All samples in the plan's order; samples after a wrong draft token are meaningless.
    tokens: list[int]
    # By sequence id: one entry for each of its samples.
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    # By sequence id: one entry for the prompt token after each position of the step, in order.
    prompt_logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    # By sequence id: the embeddings of prompts that end in the step.
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    # By sequence id: the reason why the samples of the sequence are invalid.
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Holds the tokens that a prefill samples; a decode worker continues after them."""

    # The first token of each choice, or the first candidates of a beam search.
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # the candidates' log probabilities, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """Holds the grammar and the tokens of a sequence, which decide the tokens that may follow."""

    sequence_id: int
    grammar: str
    tokens: Sequence[int]  # all known tokens; a list that grows, so do not keep it
    num_prompt: int  # prompt tokens among `tokens`
    owner: bytes = b""  # see `SamplingParams.grammar_owner`


class PrefixSource(Protocol):
    """Knows cached blocks that are neither in the KV cache nor in host memory but, say, on disk."""

    def count(self, chain: Sequence[bytes], compute_seconds: float) -> int:
        """Returns the number of leading blocks of `chain` to import; runs in the engine's thread.

        Counts blocks that are known and predicted to arrive sooner than the engine would compute
        them. `compute_seconds` is the time to compute one block; 0 means unknown.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Describes a sequence for which a draft model should propose tokens."""

    sequence_id: int
    tokens: Sequence[int]  # all known tokens; a list that grows, so do not keep it
    blocks: Sequence[int]  # its block table, with room for the known tokens and `count` more
    sampling: SamplingParams
    # The maximum number of tokens to propose, at least 1; `tokens` and these are within
    # `EngineConfig.draft_context_tokens`.
    count: int


OnLayers = Callable[[int], None]
"""Called while a step runs, with the number of layers that have all KV cache of the step."""


class Executor(ABC):
    """Executes plans in the order of its calls; used from one thread, except `expedite`."""

    @abstractmethod
    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """Starts a step and returns a function that waits for its end and returns its samples.

        The caller calls this function once. At most one further step may be launched before it does
        so. On devices that allow it, `launch` does not wait for the previous steps; then it does
        not call `on_layers`.
        """

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """Prepares grammar masks for about `seconds`; returns the ids of sequences that are ready.

        A sequence may take part in the next step if its mask is ready. Repeated calls for the other
        sequences make progress with each of them.
        """
        return [each.sequence_id for each in sequences]

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """Returns the drafts of a draft model by sequence id; empty without a draft model."""
        return {}

    def expedite(self) -> None:
        """Raises the priority of the running step, because a stream is stalled on it.

        The step no longer yields to other processes. Any thread may call it.
        """
        return

    def execute(self, plan: StepPlan) -> list[int]:
        """Launches a step and returns its tokens."""
        return self.launch(plan)().tokens


class DelegatingExecutor(Executor):
    """Passes each call to another executor; subclasses change some of the calls."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        return self._executor.launch(plan, on_layers)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        return self._executor.prepare_masks(sequences, seconds)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        return self._executor.propose(requests)

    def expedite(self) -> None:
        self._executor.expedite()
