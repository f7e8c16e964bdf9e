"""Defines a sequence inside a worker: its tokens, its counters and its state.

Knows nothing of other sequences, of tensors or of the network. One file because a beam search and
its beams, which are sequences, refer to each other.
"""

import copy
import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Self

from ...proto.hashing import hash_block, hash_chain, hash_root
from ..kv_cache.tables import TableBlocks, TableSpec
from .beam import Beams
from .block_table import SequenceTable, StateSlots, block_name
from .ngram import Drafter
from .plan import FirstTokens, SampledLogprobs, SamplingParams


class Task(enum.Enum):
    """Names the work that a worker does for a sequence."""

    COLOCATED = "colocated"  # prefill and decode here
    PREFILL = "prefill"  # prefill, sample the first token, hold the KV cache for a decode worker
    DECODE = "decode"  # receive the KV cache, then decode


class Turn(enum.Enum):
    """Names the position of a prompt among the waiting prompts."""

    # First if some of its tokens were generated elsewhere, else by priority.
    BY_INDEX = "by_index"
    FIRST_OF_PRIORITY = "first_of_priority"
    IN_ORDER = "in_order"  # by priority


class State(enum.Enum):
    """Names the state of a sequence.

        WAITING ──admit──> RUNNING ──first token of a PREFILL, or suspend──> LEASED ──> FINISHED
           └──admit with import──> IMPORTING ──commit──> RUNNING

    Every state may go to FINISHED at once (end, cancel, failure); no sequence leaves FINISHED.
    """

    WAITING = "waiting"  # in the queue; holds nothing
    # Holds blocks of a cached prefix, and reserved blocks that are being filled from elsewhere.
    IMPORTING = "importing"
    RUNNING = "running"  # in the batch
    LEASED = "leased"  # its blocks wait for a remote reader
    FINISHED = "finished"  # holds nothing


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.IMPORTING, State.RUNNING, State.FINISHED}),
    State.IMPORTING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.LEASED, State.FINISHED}),
    State.LEASED: frozenset({State.FINISHED}),
    State.FINISHED: frozenset(),
}


class FinishReason(enum.Enum):
    """Names the reason why generation ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Holds the parameters of a beam search, which replaces sampling."""

    num_best: int  # hypotheses to return; the beam width is the spec's num_choices
    # The score of a hypothesis is its log probability / its length ** length_penalty.
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRetention:
    """Asks for a prefix of the prompt to stay in the cache after its computation."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """Describes one submit of a worker; the caller has checked every bound."""

    id: int
    task: Task
    # The prompt and, after an interruption elsewhere, the tokens generated so far.
    tokens: tuple[int, ...]
    first_index: int = 0  # the index of the next generated token
    max_tokens: int  # to generate from here, at least 1
    sampling: SamplingParams  # of the first choice; choice i samples with seed + i
    num_choices: int = 1  # continuations of the prompt, as sequences id, id + 1, ...
    beam: BeamSearch | None = None  # with it, num_choices is the beam width
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: bytes = b""  # of its hashes in the prefix cache; a different one for each adapter
    adapter: int = 0  # the number of its loaded adapter; 0 means no adapter
    turn: Turn = Turn.BY_INDEX
    # The number of leading prompt tokens that another worker has cached; not for a DECODE.
    num_remote: int = 0
    retentions: tuple[PrefixRetention, ...] = ()  # not for a DECODE
    tenant: bytes = b""  # whose share of the cache the retentions use
    # False: its KV cache comes from another worker and is older than this worker's last reset.
    enters_cache: bool = True

    @property
    def max_length(self) -> int:
        """Returns the maximum number of tokens with KV cache that this sequence can have here.

        The KV cache of the last token is never computed.
        """
        return len(self.tokens) + (0 if self.task is Task.PREFILL else self.max_tokens - 1)

    @property
    def is_recovery(self) -> bool:
        """Returns True if an interrupted stream is stalled until its next token comes from here."""
        return self.first_index > 0 and self.turn is Turn.BY_INDEX

    @property
    def order(self) -> tuple[bool, int, bool]:
        """Returns the sort key of sequences that wait for blocks or for a step.

        Recoveries come first, then higher priorities. Within a priority, FIRST_OF_PRIORITY comes
        first.
        """
        return not self.is_recovery, -self.priority, self.turn is not Turn.FIRST_OF_PRIORITY

    @property
    def num_prompt(self) -> int:
        """Returns the number of `tokens` that belong to the prompt and were not generated."""
        return len(self.tokens) - self.first_index

    def finish_reason(self, token: int, num_generated: int) -> FinishReason | None:
        """Returns the reason if `token`, the num_generated-th here, finishes the sequence."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_tokens else None

    def check_first_tokens(self, first: FirstTokens) -> None:
        """Raises ValueError unless `first` has the tokens that the sequence needs.

        These are one token for each choice. For a beam search, these are at least `num_choices`
        candidates with log probabilities.
        """
        num_tokens = len(first.tokens)
        num_logprobs = len(first.logprobs)
        width = self.num_choices
        if self.beam:
            matches = width <= num_tokens == num_logprobs
        else:
            matches = (num_tokens, num_logprobs) == (width, 0)
        if not matches:
            raise ValueError(
                f"first_tokens: {num_tokens} tokens and {num_logprobs} logprobs for {width} choices"
            )

    def choice(self, number: int) -> "SequenceSpec":
        """Returns the spec of one choice as a sequence of its own."""
        seed = (self.sampling.seed + number) % 2**64
        return replace(
            self, id=self.id + number, sampling=replace(self.sampling, seed=seed), num_choices=1
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds the tokens, blocks and counters of a sequence; it has counters instead of phases.

    Planning uses `num_scheduled`; all visible results use `num_computed`. Always `num_computed <=
    num_tokens` and `num_computed <= num_scheduled <= spec.max_length`. The step that schedules the
    last token of a sequence samples the next token. Until that step is collected, the sampled token
    is *pending*: it is the next token to schedule, at position `num_scheduled == num_tokens`, but
    its id is unknown. Between two steps of the engine a sequence has at most one pending token.
    Without overlap it has no pending token, and `num_scheduled == num_computed`. A sequence whose
    next step depends on the token's id never has one: beams, sequences with a grammar, and
    sequences that will fork.

    A step may also verify a *draft*: guessed tokens after the last known token. They count as
    scheduled until the step is collected. Then the right ones become tokens with KV cache, and the
    others are dropped.
    """

    spec: SequenceSpec
    block_size: int
    submitted: float  # clock
    specs: tuple[TableSpec, ...] = ()
    tokens: list[int] = field(init=False)
    state: State = State.WAITING
    num_scheduled: int = 0  # tokens whose KV is computed or being computed by a step in flight
    num_computed: int = 0  # tokens whose KV was computed by a collected step, cached or imported
    num_cached: int = 0  # prompt tokens that the prefix cache held at admission
    num_loaded: int = 0  # cached prompt tokens that only host memory held
    # Hashes of the blocks to import after the cached ones; empty for a DECODE.
    import_hashes: tuple[bytes, ...] = ()
    tables: list[SequenceTable] = field(init=False)
    # Blocks for growth, copies and the rings of its tables, in the order of use.
    reserved: list[int] = field(default_factory=list)
    slots: StateSlots = field(default_factory=StateSlots)
    num_covered: int = 0  # the position up to which every table has blocks
    has_new_blocks: bool = False  # some table has blocks that the ranks do not know
    points: tuple[int, ...] = ()  # ascending positions of its resume points
    sampling_sent: bool = False
    # Clock time from which its prompt could be computed: admission or the end of its import.
    started: float = 0.0
    # The maximum number of tokens with KV cache here; suspension lowers it.
    max_length: int = field(init=False)
    choices: list[int] = field(init=False)  # uncancelled choices that it will fork into
    num_branches: int = field(init=False)  # sequences that it counts for: its branches or itself
    num_samples: int = field(init=False)  # tokens to sample after its last token
    may_pend: bool = field(init=False)
    scores_prompt: bool = field(init=False)  # log probabilities of its prompt are requested
    search: "Search | None" = None  # the search that it is a beam of
    prompt_logprobs: list[SampledLogprobs] = field(default_factory=list)  # collected up to now
    chain: list[bytes] = field(init=False)  # hashes of full blocks
    next_publish: int = 0  # the number of computed tokens with which a further block is full
    drafter: Drafter | None = None  # made with the first draft
    # Tokens of the draft that the step in flight verifies; num_scheduled includes them.
    num_draft: int = 0
    forgoes_drafts: bool = False
    retentions: tuple[PrefixRetention, ...] = field(init=False)  # that have not begun
    enters_cache: bool = True  # what it computes or imports enters the prefix cache

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.tokens)
        self.tables = [SequenceTable(spec, number) for number, spec in enumerate(self.specs)]
        self.chain = hash_chain(self.tokens, self.block_size, self.spec.salt)
        self.max_length = self.spec.max_length
        self.retentions = self.spec.retentions
        self.choices = list(range(self.spec.num_choices))
        self.num_branches = 1 if self.spec.task is Task.PREFILL else self.spec.num_choices
        self.num_samples = 1 if self.search else self.spec.num_choices
        self.may_pend = (
            self.num_samples == 1 and self.search is None and not self.spec.sampling.grammar
        )
        self.scores_prompt = (
            self.spec.sampling.prompt_logprobs is not None and self.spec.task is not Task.DECODE
        )

    @property
    def needs_every_position(self) -> bool:
        """Returns True if each prompt position must be computed here.

        Log probabilities of the prompt and a mean embedding need every position.
        """
        return self.scores_prompt or self.spec.sampling.pooling == "mean"

    @property
    def num_tokens(self) -> int:
        """Returns the number of known tokens."""
        return len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Returns the number of known tokens without KV cache."""
        return len(self.tokens) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Returns the number of tokens that the next steps can schedule.

        These are the known tokens and the pending token, unless that token is certainly the last or
        may not pend. Returns 0 while a draft is being verified.
        """
        if self.num_draft:
            return 0
        end = max(len(self.tokens), self.num_scheduled + self.may_pend)
        return min(end, self.max_length) - self.num_scheduled

    @property
    def may_draft(self) -> bool:
        """Returns True if a step could verify a draft of the sequence's next tokens.

        The sequence must have its first token, and its sampling must not depend on other state that
        changes with each token. A grammar together with bad words excludes drafts. If they leave no
        token, the sequence fails, even if that is only so after a wrong token of the draft.
        """
        sampling = self.spec.sampling
        is_late = len(self.tokens) >= sampling.min_length or not sampling.stop_ids
        is_alone = self.num_samples == 1 and self.search is None and self.num_generated > 0
        may_verify = is_late and not (sampling.grammar and sampling.bad_words)
        return is_alone and may_verify and not self.forgoes_drafts

    @property
    def needs_mask(self) -> bool:
        """Returns True if the next step can schedule the sequence and needs a new grammar mask.

        The mask of the first token of a completion is known as soon as the grammar is compiled.
        """
        if not self.spec.sampling.grammar or len(self.tokens) == self.spec.num_prompt:
            return False
        return self.num_unscheduled > 0

    @property
    def num_generated(self) -> int:
        """Returns the number of tokens that this worker has generated."""
        return len(self.tokens) - len(self.spec.tokens)

    @property
    def held_blocks(self) -> list[int]:
        """Returns the blocks that the sequence owns or leases."""
        return [block for table in self.tables for block in table.held_blocks]

    @property
    def reserved_blocks(self) -> list[int]:
        """Returns the blocks that are reserved for the sequence."""
        return [*self.reserved, *(block for table in self.tables for block in table.tail)]

    @property
    def is_suspended(self) -> bool:
        """Returns True if the sequence waits for its lease and no step computes it any more."""
        return self.num_computed == self.max_length < self.spec.max_length

    def suspend(self) -> None:
        """Stops scheduling after the prompt and the tokens that a step in flight computes."""
        self.max_length = max(self.num_scheduled - self.num_draft, len(self.spec.tokens))

    def accept(self, tokens: Items[int]) -> None:
        """Appends the accepted tokens of a draft and the token after them.

        Drops the rest of the draft. Its blocks stay for later tokens.
        """
        self.tokens += tokens
        # Computed are the token before the draft and all of `tokens` except the last.
        self.num_computed += len(tokens)
        self.num_scheduled = self.num_computed
        self.num_draft = 0
        self.max_length = max(self.max_length, self.num_computed)
        if self.drafter is not None:
            self.drafter.record(len(tokens) - 1)

    def forgo_drafts(self) -> None:
        """Drops a draft whose step has failed, and makes no further drafts.

        The draft itself may have caused the failure. If not, the step without a draft fails again.
        That step registers the sequence anew, because the ranks have counted the failed tokens for
        penalties.
        """
        self.num_scheduled = self.num_computed
        self.num_draft = 0
        self.forgoes_drafts = True
        self.forget_sent()

    def move(self, state: State) -> None:
        """Changes the state; raises RuntimeError for a move that is not in MOVES."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"sequence {self.spec.id}: {self.state.value} -> {state.value}")
        self.state = state

    def become(self, spec: SequenceSpec) -> None:
        """Turns the sequence into one of its own branches."""
        self.spec = spec
        self.choices = [0]
        self.num_branches = 1
        self.num_samples = 1
        self.may_pend = self.search is None and not spec.sampling.grammar

    def branch(self, spec: SequenceSpec) -> Self:
        """Returns a sequence with the same tokens and full blocks, not known to the ranks.

        The caller must share these blocks.
        """
        branch = copy.copy(self)
        branch.become(spec)
        branch.tables = [table.branch(self.num_computed) for table in self.tables]
        branch.reserved = []
        branch.slots = StateSlots()
        branch.prompt_logprobs = []
        branch.continue_from(self)
        return branch

    def continue_from(self, other: "Sequence") -> None:
        """Copies the tokens of a sequence that has the same number of computed tokens."""
        self.tokens = other.tokens.copy()
        self.chain = other.chain.copy()
        self.next_publish = other.next_publish
        self.forget_sent()

    def forget_sent(self) -> None:
        """Makes the next step register the sequence with the ranks again."""
        for table in self.tables:
            table.num_sent = 0
        self.has_new_blocks = True
        self.sampling_sent = False

    def take_new_blocks(self) -> tuple[TableBlocks, ...]:
        """Returns the blocks of each table that the ranks do not know yet."""
        self.has_new_blocks = False
        return tuple(table.take_new() for table in self.tables)

    def cover(self) -> None:
        """Sets the position up to which every table has blocks."""
        self.num_covered = min(table.num_covered for table in self.tables)
        self.has_new_blocks = True

    def take_prompt_logprobs(self) -> tuple[SampledLogprobs, ...]:
        """Returns and clears the log probabilities of the prompt tokens after the first."""
        taken = self.prompt_logprobs
        self.prompt_logprobs = []
        return tuple(taken[: self.spec.num_prompt - 1])

    def extend_chain(self) -> None:
        """Adds the hashes of the blocks that became full since the last call."""
        size = self.block_size
        for index in range(len(self.chain), self.num_computed // size):
            parent = self.chain[-1] if self.chain else hash_root(self.spec.salt)
            self.chain.append(hash_block(parent, self.tokens[index * size : (index + 1) * size]))

    def publishable(self) -> list[tuple[int, bytes]]:
        """Returns (block, name) of the blocks that became full and computed since the last call."""
        self.extend_chain()
        size = self.block_size
        fresh: list[tuple[int, bytes]] = []
        for table in self.tables:
            ratio = table.spec.block_size // size
            full = self.num_computed // table.spec.block_size
            for index in range(max(table.num_published, table.first), full):
                name = block_name(self.chain[(index + 1) * ratio - 1], table.number)
                fresh.append((table.blocks[index - table.first], name))
            table.num_published = max(table.num_published, full)
        self.next_publish = min(
            (table.num_published + 1) * table.spec.block_size for table in self.tables
        )
        return fresh


@dataclass(slots=True, eq=False)
class Search:
    """Holds a beam search; its beams are sequences that share their steps and end together."""

    spec: SequenceSpec  # as submitted
    beams: Beams = field(init=False)
    # The beams, the likeliest first. Until the fork it is only the prompt.
    members: list[Sequence] = field(default_factory=list)
    choices: list[int] = field(init=False)  # the uncancelled hypotheses
    prefill_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a spec without a beam search."""
        spec = self.spec
        beam = spec.beam
        if beam is None:
            raise ValueError("beam: missing")
        self.beams = Beams(
            width=spec.num_choices,
            max_tokens=spec.max_tokens,
            stop_ids=spec.stop_ids,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            min_tokens=spec.sampling.min_length - len(spec.tokens),
            late_ids=frozenset(spec.sampling.stop_ids),
        )
        self.choices = list(range(beam.num_best))

    def member_spec(self) -> SequenceSpec:
        """Returns the spec of the sequence that computes the prompt.

        Its top log probabilities are the candidates.
        """
        return replace(
            self.spec, sampling=SamplingParams(temperature=0.0, logprobs=self.beams.num_candidates)
        )
