"""Defines the plan of a step, its samples, and the interface of executors.

Knows nothing of tensors, devices or networks.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

Pooling = Literal["last", "mean"]
"""Of the hidden states after the last norm, that of a prompt's last token, or their mean."""

NOT_FINITE: Final = "the model's output is not finite"
"""Why a sequence fails for which the model computed NaN or infinity: `Samples.failed`."""

PENDING_TOKEN: Final = -1
"""Stands in a plan for the token that the sequence's previous step samples, whose id is not known
yet. Between the two there are only steps without sequences.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Holds how the next token is sampled. The noise is keyed by (seed, position), independent of
    the batch.
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
    # excluded before the sequence has min_length tokens; empty without min_length
    stop_ids: tuple[int, ...] = ()
    min_length: int = 0
    grammar: str = ""  # of the completion, in llguidance's format
    grammar_owner: bytes = b""  # sequences of one owner share what is compiled of a grammar
    # number of top alternatives to report for each sampled token; None reports nothing
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for each prompt token
    pooling: Pooling | None = None  # which embedding of the prompt to report with the first sample

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the previous tokens other than through the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )
        return penalties or bool(self.bad_words) or bool(self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """Holds one sequence's part of a step. Ranks keep the block tables; a step has only the
    difference.

    A step with `sampling` registers the sequence, or replaces it: then its block table is
    `new_blocks` alone.
    """

    sequence_id: int
    # the tokens whose KV is computed in this step, at least one; or PENDING_TOKEN alone
    token_ids: tuple[int, ...]
    start: int  # the position of token_ids[0]; every earlier position has its KV in the block table
    new_blocks: tuple[int, ...]  # appended to the sequence's block table before the step
    sampling: SamplingParams | None  # set in the sequence's first step on this worker, then None
    num_samples: int  # tokens sampled to follow token_ids[-1]; the i-th with `sampling.seed` + i
    # The last tokens of token_ids that are a draft, guessed to follow. Then one token is sampled to
    # follow the token before them and one to follow each of them: num_draft + 1 samples, all with
    # `sampling.seed`.
    num_draft: int = 0
    # with a `sampling` that needs it: all known tokens of the sequence
    history: tuple[int, ...] = ()
    num_prompt: int = 0  # prompt tokens in the history
    # with `sampling`: the number under which the sequence's adapter is loaded; 0 is none
    adapter: int = 0
    # follows token_ids[-1] in the prompt, if `prompt_logprobs` are requested
    next_prompt_token: int | None = None

    def each_sample(self) -> "Iterable[SequenceStep]":
        """Returns the step as steps up to each token after which it samples, each with one token of
        the draft more.
        """
        if not self.num_draft:
            return (self,)
        known, counts = len(self.token_ids) - self.num_draft, range(self.num_draft + 1)
        return [
            replace(self, token_ids=self.token_ids[: known + n], num_samples=1, num_draft=n)
            for n in counts
        ]

    @property
    def draft(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_draft :]

    def num_accepted(self, samples: Sequence[int]) -> int:
        """Returns how many tokens of the draft are right by the step's samples; the sample after
        these holds, too.
        """
        pairs = zip(self.draft, samples, strict=False)
        return next(
            (index for index, (guess, token) in enumerate(pairs) if guess != token), self.num_draft
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Holds one step of a worker."""

    sequences: tuple[SequenceStep, ...]
    dropped: tuple[int, ...]  # sequence ids to forget before this step
    # (source, target) blocks, copied before this step; no target is a source
    copies: tuple[tuple[int, int], ...] = ()
    unloaded: tuple[int, ...] = ()  # adapters that no further step names
    # Before this step and its copies, (block, slot) of what is first copied to slots of host
    # memory, no slot twice, and then (slot, block) of what is copied back.
    saved: tuple[tuple[int, int], ...] = ()
    restored: tuple[tuple[int, int], ...] = ()
    # a stream that was interrupted elsewhere stands still until it is done
    is_expedited: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the step computes."""
        return sum(len(step.token_ids) for step in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of chunks of more than one."""
        return sum(
            len(step.token_ids)
            for step in self.sequences
            if len(step.token_ids) > 1 + step.num_draft
        )

    @property
    def has_decodes(self) -> bool:
        """Whether a sequence continues with one token and samples the next; decodes are the first
        in `sequences`.
        """
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
    """Holds natural logarithms of the model's own distribution, before temperature, penalties,
    filters and masks; float32.
    """

    logprob: float  # of the token itself
    rank: int = 0  # one more than there are likelier tokens; 0: it was not counted
    # the likeliest token ids with their log probabilities, the likeliest first
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Holds the sampled tokens of a step."""

    # all samples, in the plan's order; those after a wrong token of a draft mean nothing
    tokens: list[int]
    # By sequence id, one for each of its samples.
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    # By sequence id: of the tokens that follow each of the step's positions in the prompt, in
    # order.
    prompt_logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    # by sequence id, of prompts that end in the step
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    # reasons, by ids of sequences whose samples are invalid
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Holds what a prefill samples for the decode worker, which continues with it and the prompt's
    KV cache.
    """

    # the first token of each choice, or the first candidates of a beam search
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # the candidates' log probabilities, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """Holds what decides which tokens may follow in a sequence under a grammar."""

    sequence_id: int
    grammar: str
    tokens: Sequence[int]  # all known ones; not to be kept, since they grow
    num_prompt: int  # of these
    owner: bytes = b""  # see `SamplingParams.grammar_owner`


class PrefixSource(Protocol):
    """Knows blocks of the prefix cache that are neither in the KV cache nor in host memory, such as
    on disk.
    """

    def count(self, chain: Sequence[bytes], compute_seconds: float) -> int:
        """Returns how many blocks, from the first on, are to be imported: they are known, and
        predicted to be here before they would be computed, in so many seconds each; 0 if that is
        unknown. Called in the engine's thread.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Holds a sequence whose next tokens a draft model is to propose."""

    sequence_id: int
    tokens: Sequence[int]  # all known ones; not to be kept, since they grow
    blocks: Sequence[int]  # its block table, with room for the known tokens and `count` more
    sampling: SamplingParams
    count: int  # tokens to propose, at most; at least 1


OnLayers = Callable[[int], None]
"""Called while a step runs with the number of layers that have the KV cache of all the step's
tokens.
"""


class Executor(Protocol):
    """Executes plans in the order of its calls. Used from one thread, but for `expedite`."""

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """Starts a step; where the device allows it, without waiting for the previous steps and
        without calls of `on_layers`.

        The result, called once, waits for the step to end and returns its samples. At most one step
        may be launched before the last one's samples are collected.
        """
        ...

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """Works for about so long on the masks of what may follow in these sequences; returns the
        ids of those whose mask is ready, which may take part in the next step. Called again for the
        others, it gets to each.
        """
        return [each.sequence_id for each in sequences]

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """Returns by a draft model what may follow in these sequences, by id; nothing without one."""
        return {}

    def expedite(self) -> None:
        """Has the step under way, if it waits for other processes, wait no longer: a stream stands
        still until it has ended. Called from any thread.
        """
        return

    def execute(self, plan: StepPlan) -> list[int]:
        """Launches a step and returns its tokens."""
        return self.launch(plan)().tokens
