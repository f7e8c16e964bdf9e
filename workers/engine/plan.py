"""What the scheduler decides and a rank carries out: frozen plans, and the two interfaces that carry them out.

Knows nothing of tensors, devices or networks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

PENDING_TOKEN: Final = -1
"""In a plan: the token that the sequence's step before this one samples, whose number the planner does not know yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. The noise is keyed by (seed, position), so it does not depend on the batch."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0  # 64 bits
    repetition_penalty: float = 1.0  # for tokens of prompt and completion
    presence_penalty: float = 0.0  # these two for tokens of the completion
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are not to be completed
    stop_ids: tuple[int, ...] = ()  # not drawn before the sequence has min_length tokens; set only if that is wanted
    min_length: int = 0
    grammar: str = ""  # of the completion, as llguidance reads it
    logprobs: int | None = None  # alternatives of each drawn token to report; None reports nothing
    prompt_logprobs: int | None = None  # the same of each prompt token

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens before, beyond what the model sees of them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalties or bool(self.bad_words) or bool(self.grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """One sequence's part of a step. A rank keeps the block table; only what is new travels.

    A step with `sampling` makes the sequence known, or anew if it was: then its block table is `new_blocks` alone."""

    sequence_id: int
    token_ids: tuple[int, ...]  # the tokens whose KV is computed in this step, at least one; or PENDING_TOKEN alone
    start: int  # the position of token_ids[0]; every earlier position has its KV in the block table
    new_blocks: tuple[int, ...]  # appended to the sequence's block table before the step
    sampling: SamplingParams | None  # set in the sequence's first step on this worker, then None
    num_samples: int  # how many tokens are drawn to follow token_ids[-1]; the i-th with `sampling.seed` + i
    history: tuple[int, ...] = ()  # with a `sampling` that needs it: all known tokens of the sequence
    num_prompt: int = 0  # how many of them are prompt
    next_prompt_token: int | None = None  # what follows token_ids[-1] in the prompt, if `prompt_logprobs` are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of a worker."""

    sequences: tuple[SequenceStep, ...]
    dropped: tuple[int, ...]  # sequence ids to forget before this step
    copies: tuple[tuple[int, int], ...] = ()  # blocks copied whole, from and to, before this step; no target is copied

    @property
    def num_tokens(self) -> int:
        return sum(len(step.token_ids) for step in self.sequences)

    @property
    def has_decodes(self) -> bool:
        """They come first: a sequence that goes on with one token and draws the next."""
        first = self.sequences[0] if self.sequences else None
        return first is not None and first.start > 0 and len(first.token_ids) == 1 and first.num_samples > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprobs:
    """Natural logarithms of the model's own distribution, before temperature, penalties, filters and masks; float32."""

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # the likeliest token ids, the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What a step drew."""

    tokens: list[int]  # of every draw, in the plan's order
    logprobs: dict[int, list[SampledLogprobs]] = field(
        default_factory=dict
    )  # by sequence id, one for each of its draws
    # By sequence id: of the tokens that follow each of the step's positions in the prompt, in order.
    prompt_logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # why, by sequence id, its draws are none and it cannot go on


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """What a decode goes on with, beside the KV cache of the prompt."""

    tokens: tuple[int, ...]  # the first of each choice; or the candidates for the first of a beam search,
    logprobs: tuple[float, ...] = ()  # and their log probabilities, float32


OnLayers = Callable[[int], None]
"""Told now and then, while a step runs, how many layers have the KV cache of all the step's tokens."""


class Executor(Protocol):
    """Carries out plans in the order in which they come. Used from one thread."""

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """Starts a step, where the device allows it without waiting for the steps before. One that does so has nothing
        to say to `on_layers`.

        The result, called once, waits for the step to end and returns what it drew. At most one step may be launched
        before the last one's draws are collected."""
        ...

    def execute(self, plan: StepPlan) -> list[int]:
        """Launches a step and waits for its tokens."""
        return self.launch(plan)().tokens
