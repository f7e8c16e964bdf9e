"""Defines a sequence inside a worker: its tokens, its counters and its state.

Knows nothing of other sequences, of tensors or of the network.
"""

import copy
import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Self

from ...proto.hashing import hash_block, hash_chain, hash_root
from .beam import Beams
from .ngram import Drafter
from .plan import FirstTokens, SampledLogprobs, SamplingParams


class Task(enum.Enum):
    """Names what a worker does with a sequence."""

    COLOCATED = "colocated"  # prefill and decode here
    PREFILL = "prefill"  # prefill, sample the first token, hold the KV cache for a decode worker
    DECODE = "decode"  # receive the KV cache, then decode


class Turn(enum.Enum):
    """Says when a prompt is computed, of those that wait."""

    # before all others if some of it was generated elsewhere, else by priority
    BY_INDEX = "by_index"
    FIRST_OF_PRIORITY = "first_of_priority"
    IN_ORDER = "in_order"  # by priority


class State(enum.Enum):
    """Names the state of a sequence.

        WAITING ──admit──> RUNNING ──first token of a PREFILL, or suspend──> LEASED ──> FINISHED
           └──admit what imports──> IMPORTING ──commit──> RUNNING

    Every state may go to FINISHED at once (end, cancel, failure); nothing leaves FINISHED.
    """

    WAITING = "waiting"  # in the queue; holds nothing
    # holds blocks of a cached prefix and reserved ones that are being filled from elsewhere
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
    """Names why generation ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """Holds the parameters of a beam search, which replaces sampling."""

    num_best: int  # hypotheses to return; the beam width is the spec's num_choices
    # a hypothesis scores its log probability / its length ** length_penalty
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """Holds one submit of a worker. The caller has checked every bound."""

    id: int
    task: Task
    # the prompt and, after an interruption elsewhere, the tokens generated so far
    tokens: tuple[int, ...]
    first_index: int = 0  # the index of the next generated token
    max_tokens: int  # to generate from here, at least 1
    sampling: SamplingParams  # of the first choice; choice i draws with seed + i
    num_choices: int = 1  # continuations of the one prompt, as sequences id, id + 1, ...
    beam: BeamSearch | None = None  # then num_choices is its width
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: bytes = b""  # of its prefixes in the cache; another one for each adapter
    adapter: int = 0  # the number under which its adapter is loaded; 0 is none
    turn: Turn = Turn.BY_INDEX
    # of the first tokens of a prompt that is computed here, those that another worker has cached
    num_remote: int = 0

    @property
    def max_length(self) -> int:
        """The most tokens with KV cache that this sequence can have here. The last token's KV is
        never computed.
        """
        return len(self.tokens) + (0 if self.task is Task.PREFILL else self.max_tokens - 1)

    @property
    def continues(self) -> bool:
        """Whether a stream that was interrupted elsewhere stands still until this has its first
        token.
        """
        return self.first_index > 0 and self.turn is Turn.BY_INDEX

    @property
    def order(self) -> tuple[bool, int, bool]:
        """Sorts what waits, for blocks or for a step: a stream that stands still goes ahead; then
        the higher priority, and of one priority what is to go first.
        """
        return not self.continues, -self.priority, self.turn is not Turn.FIRST_OF_PRIORITY

    @property
    def num_prompt(self) -> int:
        """How many of `tokens` no worker has generated."""
        return len(self.tokens) - self.first_index

    def finish_reason(self, token: int, num_generated: int) -> FinishReason | None:
        """Returns whether and why the sequence finishes with this token, the num_generated-th here."""
        if token in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_tokens else None

    def check_first_tokens(self, first: FirstTokens) -> None:
        """Raises ValueError unless `first` has one token for each choice, or at least as many
        candidates with log probabilities as a beam search is wide.
        """
        num_tokens, num_logprobs, width = len(first.tokens), len(first.logprobs), self.num_choices
        matches = (
            width <= num_tokens == num_logprobs
            if self.beam
            else (num_tokens, num_logprobs) == (width, 0)
        )
        if not matches:
            raise ValueError(
                f"first_tokens: {num_tokens} tokens and {num_logprobs} logprobs for {width} choices"
            )

    def choice(self, number: int) -> "SequenceSpec":
        """Returns one of several choices as a sequence of its own."""
        seed = (self.sampling.seed + number) % 2**64
        return replace(
            self, id=self.id + number, sampling=replace(self.sampling, seed=seed), num_choices=1
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """Holds a sequence's counters, not phases: planning uses `num_scheduled`, all visible results
    `num_computed`.

    Always `num_computed <= num_tokens` and `num_computed <= num_scheduled <= spec.max_length`. The
    step that schedules the last token of a sequence samples the one after it. Until that step is
    collected, the sampled token is *pending*: the next to schedule, at position `num_scheduled ==
    num_tokens`, but of unknown id. Between two steps of the engine a sequence has at most one, and
    none without overlap: then `num_scheduled == num_computed`. Sequences whose next
    step depends on its id have none: beams, sequences with a grammar, and sequences that will fork.

    A step may also verify a *draft*: guessed tokens after the last known one. They count as
    scheduled until the step is collected; then those that are right are tokens, with KV cache, and
    the others have never been.
    """

    spec: SequenceSpec
    block_size: int
    submitted: float  # clock
    tokens: list[int] = field(init=False)
    state: State = State.WAITING
    num_scheduled: int = 0  # tokens whose KV is computed or being computed by a step in flight
    num_computed: int = 0  # tokens whose KV was computed by a collected step, cached or imported
    num_cached: int = 0  # prompt tokens that the prefix cache held at admission
    num_restored: int = 0  # those of them that it held in host memory only
    # hashes of the blocks after those that are to be imported, but for a DECODE
    importing: tuple[bytes, ...] = ()
    blocks: list[int] = field(default_factory=list)  # the block table: shared ones and own ones
    # for the import and for growth, in the order of use
    reserved: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0  # how many of `blocks` the ranks know
    sampling_sent: bool = False
    # clock; when its prompt could be computed: at admission, or once it had been imported
    started: float = 0.0
    # tokens that get KV cache here; below the spec's once it is being suspended
    max_length: int = field(init=False)
    choices: list[int] = field(init=False)  # uncancelled choices that it will fork into
    num_slots: int = field(init=False)  # sequences that it counts for: those it will fork into
    num_samples: int = field(init=False)  # tokens to sample after its last one
    may_pend: bool = field(init=False)
    scores_prompt: bool = field(init=False)  # log probabilities of its prompt are requested
    search: "Search | None" = None  # the search that it is a beam of
    # the block whose content the next step copies into its last block
    copy_source: int | None = None
    prompt_logprobs: list[SampledLogprobs] = field(default_factory=list)  # so far
    chain: list[bytes] = field(init=False)  # hashes of the full blocks, as far as computed
    num_published: int = 0
    drafter: Drafter | None = None  # made with the first draft
    # tokens of the draft that the step in flight verifies; counted in num_scheduled
    num_draft: int = 0
    forgoes_drafts: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.tokens)
        self.chain = hash_chain(self.tokens, self.block_size, self.spec.salt)
        self.max_length = self.spec.max_length
        self.choices = list(range(self.spec.num_choices))
        self.num_slots = 1 if self.spec.task is Task.PREFILL else self.spec.num_choices
        self.num_samples = 1 if self.search else self.spec.num_choices
        self.may_pend = (
            self.num_samples == 1 and self.search is None and not self.spec.sampling.grammar
        )
        self.scores_prompt = (
            self.spec.sampling.prompt_logprobs is not None and self.spec.task is not Task.DECODE
        )

    @property
    def needs_every_position(self) -> bool:
        """Whether something is reported of each position of the prompt, so that all are to be
        computed here.
        """
        return self.scores_prompt or self.spec.sampling.pooling == "mean"

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV cache."""
        return len(self.tokens) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens that the next steps can schedule: the known ones and after them the pending one,
        unless it is the last token in any case or may not pend. None while a draft is being
        verified.
        """
        if self.num_draft:
            return 0
        return (
            min(max(len(self.tokens), self.num_scheduled + self.may_pend), self.max_length)
            - self.num_scheduled
        )

    @property
    def may_draft(self) -> bool:
        """Whether a draft of what follows could be verified: what it samples depends on nothing
        else that changes with each token, and it has its first token. Where a grammar and bad words
        leave no token, an end token is sampled that the grammar does not allow; then nothing can
        follow it, so nothing is guessed for both together.
        """
        sampling = self.spec.sampling
        is_late = len(self.tokens) >= sampling.min_length or not sampling.stop_ids
        is_alone = self.num_samples == 1 and self.search is None and self.num_generated > 0
        may_verify = is_late and not (sampling.grammar and sampling.bad_words)
        return is_alone and may_verify and not self.forgoes_drafts

    @property
    def needs_mask(self) -> bool:
        """Whether it is under a grammar, the next step can schedule it, and what may follow depends
        on its tokens. What a completion may begin with is known as soon as the grammar is compiled.
        """
        if not self.spec.sampling.grammar or len(self.tokens) == self.spec.num_prompt:
            return False
        return self.num_unscheduled > 0

    @property
    def num_generated(self) -> int:
        """Tokens generated since the sequence came to this worker."""
        return len(self.tokens) - len(self.spec.tokens)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that the sequence owns or leases."""
        return self.blocks if self.copy_source is None else [*self.blocks, self.copy_source]

    @property
    def max_blocks(self) -> int:
        """Blocks for the longest that this sequence can become here."""
        return -(-self.spec.max_length // self.block_size)

    @property
    def is_suspended(self) -> bool:
        """Whether another worker is to continue, and nothing that it needs is still being computed."""
        return self.num_computed == self.max_length < self.spec.max_length

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks for the tokens that were submitted."""
        return -(-len(self.spec.tokens) // self.block_size)

    def suspend(self) -> None:
        """Has nothing more scheduled after the prompt and what a step in flight computes."""
        self.max_length = max(self.num_scheduled - self.num_draft, len(self.spec.tokens))

    def accept(self, tokens: Items[int]) -> None:
        """Appends the verified tokens of a draft and the token after them, and takes the rest of
        the draft back. The blocks for it stay, for the tokens to come.
        """
        self.tokens += tokens
        # the token before the draft, and all of these but the last
        self.num_computed += len(tokens)
        self.num_scheduled, self.num_draft = self.num_computed, 0
        self.max_length = max(self.max_length, self.num_computed)
        if self.drafter is not None:
            self.drafter.record(len(tokens) - 1)

    def forgo_drafts(self) -> None:
        """Takes a draft back whose step has failed, and has no other made: it may be the draft's
        own fault. If it is not, the step without one fails, too. That step registers the sequence
        anew: what the ranks keep of its tokens for penalties has those that failed.
        """
        self.num_scheduled, self.num_draft, self.forgoes_drafts = self.num_computed, 0, True
        self.sampling_sent, self.num_sent_blocks = False, 0

    def move(self, state: State) -> None:
        """Changes the state. Raises RuntimeError for a move that MOVES does not have."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"sequence {self.spec.id}: {self.state.value} -> {state.value}")
        self.state = state

    def become(self, spec: SequenceSpec) -> None:
        """Makes the sequence one of those that it forks into."""
        self.spec, self.choices, self.num_slots, self.num_samples = spec, [0], 1, 1
        self.may_pend = self.search is None and not spec.sampling.grammar

    def branch(self, spec: SequenceSpec) -> Self:
        """Returns another sequence with the same tokens, which holds no block and is unknown to the
        ranks.
        """
        branch = copy.copy(self)
        branch.become(spec)
        branch.blocks, branch.reserved, branch.prompt_logprobs = [], [], []
        branch.continue_from(self)
        return branch

    def continue_from(self, other: "Sequence") -> None:
        """Copies the tokens of another sequence that has computed equally many."""
        self.tokens, self.chain, self.num_published = (
            other.tokens.copy(),
            other.chain.copy(),
            other.num_published,
        )
        self.forget_sent()

    def forget_sent(self) -> None:
        """Has the next step register the sequence with the ranks again."""
        self.num_sent_blocks, self.sampling_sent = 0, False

    def take_prompt_logprobs(self) -> tuple[SampledLogprobs, ...]:
        """Returns, and clears, the log probabilities of the prompt tokens after the first."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return tuple(taken[: self.spec.num_prompt - 1])

    def publishable(self) -> list[tuple[int, bytes]]:
        """Returns the blocks that have become full and computed since the last call, with their
        hashes.
        """
        size = self.block_size
        full = self.num_computed // size
        for index in range(len(self.chain), full):
            parent = self.chain[-1] if self.chain else hash_root(self.spec.salt)
            self.chain.append(hash_block(parent, self.tokens[index * size : (index + 1) * size]))
        fresh = [(self.blocks[i], self.chain[i]) for i in range(self.num_published, full)]
        self.num_published = full
        return fresh


@dataclass(slots=True, eq=False)
class Search:
    """Holds a beam search, whose beams are sequences that are scheduled in the same steps and end
    together.
    """

    spec: SequenceSpec  # as submitted
    beams: Beams = field(init=False)
    # the beams, the likeliest first; until the fork the prompt
    members: list[Sequence] = field(default_factory=list)
    choices: list[int] = field(init=False)  # the uncancelled hypotheses
    prefill_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a spec without beam search."""
        spec, beam = self.spec, self.spec.beam
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
        """Returns the spec of the sequence that computes the prompt, whose top log probabilities
        are the candidates.
        """
        return replace(
            self.spec, sampling=SamplingParams(temperature=0.0, logprobs=self.beams.num_candidates)
        )
