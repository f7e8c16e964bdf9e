"""One request inside a worker: its tokens, its counters, its place in the table of states.

Knows nothing of other sequences, of tensors or of the network.
"""

import enum
from dataclasses import dataclass, field

from ...proto.hashing import hash_block, hash_chain, hash_root
from .plan import SamplingParams


class Task(enum.Enum):
    """What a worker does with a sequence."""

    WHOLE = "whole"  # prefill and decode here
    PREFILL = "prefill"  # prefill, sample the first token, hold the KV cache for a decode worker
    DECODE = "decode"  # receive the KV cache, then decode


class State(enum.Enum):
    """Where a sequence stands.

        WAITING ──admit──> RUNNING ──first token of a PREFILL──> LEASED ──> FINISHED
           └──admit a DECODE──> IMPORTING ──commit──> RUNNING

    Every state may go to FINISHED at once (end, cancel, failure); nothing leaves FINISHED.
    """

    WAITING = "waiting"  # in the queue; holds nothing
    IMPORTING = "importing"  # holds shared prefix blocks and reserved ones that the transfer is filling
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
    """Why generation ended."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearch:
    """A search for the likeliest continuations, in the place of sampling."""

    num_best: int  # hypotheses to answer with; the number kept is the spec's num_choices
    length_penalty: float = 1.0  # a hypothesis is worth its log probability / its length ** length_penalty
    early_stopping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What a worker is asked to do. The caller has checked every bound."""

    id: int
    task: Task
    tokens: tuple[int, ...]  # the prompt and, after a failure elsewhere, the tokens generated so far
    first_index: int = 0  # the index of the next generated token
    max_tokens: int  # to generate from here, at least 1
    sampling: SamplingParams  # of the first choice; choice i draws with seed + i
    num_choices: int = 1  # continuations of the one prompt, as sequences id, id + 1, ...
    beam: BeamSearch | None = None  # then num_choices is its width
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: bytes = b""

    @property
    def max_length(self) -> int:
        """Tokens with KV of the longest this sequence can become here. The last token's KV is never computed."""
        return len(self.tokens) + (0 if self.task is Task.PREFILL else self.max_tokens - 1)


@dataclass(slots=True, eq=False)
class Sequence:
    """Counters, not phases: planning goes by `num_scheduled`, all that others see goes by `num_computed`.

    Always `num_computed <= num_tokens` and `num_computed <= num_scheduled <= spec.max_length`. The step that schedules
    the last token of a sequence samples the one after it. Until that step is collected, the sampled token is *pending*:
    the next to schedule, at position `num_scheduled == num_tokens`, but of unknown number. Between two steps of the
    engine a sequence has at most one, and none without overlap: then `num_scheduled == num_computed`.
    """

    spec: SequenceSpec
    block_size: int
    submitted: float  # clock
    tokens: list[int] = field(init=False)
    state: State = State.WAITING
    num_scheduled: int = 0  # tokens whose KV is computed or being computed by a step in flight
    num_computed: int = 0  # tokens whose KV was computed by a step that is collected, or came by another way
    num_cached: int = 0  # prompt tokens that the prefix cache held at admission
    blocks: list[int] = field(default_factory=list)  # the block table: shared ones and own ones
    reserved: list[int] = field(default_factory=list)  # for the import and for growth, in the order of use
    num_sent_blocks: int = 0  # of `blocks`, known to the ranks
    sampling_sent: bool = False
    admitted: float = 0.0  # clock
    chain: list[bytes] = field(init=False)  # hashes of the full blocks, as far as computed
    num_published: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.tokens)
        self.chain = hash_chain(self.tokens, self.block_size, self.spec.salt)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is not there yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_unscheduled(self) -> int:
        """Tokens that the next steps can take: the known ones or, after those, the pending one, unless it is the last
        whatever its number: 0."""
        return min(max(len(self.tokens), self.num_scheduled + 1), self.spec.max_length) - self.num_scheduled

    @property
    def num_generated(self) -> int:
        """Tokens generated since the sequence came to this worker."""
        return len(self.tokens) - len(self.spec.tokens)

    @property
    def max_blocks(self) -> int:
        return -(-self.spec.max_length // self.block_size)

    @property
    def num_prompt_blocks(self) -> int:
        return -(-len(self.spec.tokens) // self.block_size)

    def move(self, state: State) -> None:
        """Raises RuntimeError for a move that the table does not have."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"sequence {self.spec.id}: {self.state.value} -> {state.value}")
        self.state = state

    def append(self, token: int) -> FinishReason | None:
        """Takes one generated token; says whether it ends the sequence."""
        self.tokens.append(token)
        if token in self.spec.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated >= self.spec.max_tokens else None

    def publishable(self) -> list[tuple[int, bytes]]:
        """The blocks that have become full and computed since the last call, with their hashes."""
        size = self.block_size
        full = self.num_computed // size
        for index in range(len(self.chain), full):
            parent = self.chain[-1] if self.chain else hash_root(self.spec.salt)
            self.chain.append(hash_block(parent, self.tokens[index * size : (index + 1) * size]))
        fresh = [(self.blocks[i], self.chain[i]) for i in range(self.num_published, full)]
        self.num_published = full
        return fresh
