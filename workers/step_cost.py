"""Predicts the time of an engine's steps, and how many prompt tokens a step has time for.

Pure: the engine passes the measured times, and the scheduler gets the prediction as data. Knows
nothing of sequences, blocks or clocks.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from ..proto.costs import LinearCost, LinearFit

LEAST_CHUNK: Final = 8
"""The minimum of prompt tokens in a mixed step with time limits, so that prompts always progress.

On CPUs so few tokens take about as long as one, because all of them read the weights once.
"""

_EFFICIENT: Final = 2.0
"""How much longer the tokens of a chunk take, at least, than the fixed time that a chunk adds.

So a prompt takes at most 1.5 times the time of its tokens, in addition to the decodes. The fixed
time counts on GPUs, where a step with prompts is not captured in a CUDA graph.
"""

_MAX_MIXED_STEPS: Final = 50
"""Mixed steps in a row after which a step without prompts is due, to measure it.

A service that always has prompts would otherwise never learn that its contexts have become longer.
"""

_MIXED_STEPS_EACH: Final = 8
"""The same for each measurement so far, so that one wrong first measurement is soon corrected."""

_MAX_EARLY: Final = 20
"""The number of steps to which the first measurement of decodes is applied afterwards."""

_TRUSTED: Final = 8
"""The number of measured steps with prompts from which the fitted fixed time is used.

Before, the fixed time counts as 0. A line through two times that differ by noise would make the
next chunk far too long.
"""

_CONSTANT: Final = LinearCost(fixed=1.0, each=0.0)
"""The prior of decodes: without different batches, a step takes as long for any batch."""

_PROPORTIONAL: Final = LinearCost(fixed=0.0, each=1.0)
"""The prior of prompts: without different chunks, their time is proportional to their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Predicts the seconds of a step: of its decodes, and of its prompt tokens in addition.

    None stands for a part that has not been measured.
    """

    decode: LinearCost | None = None  # of rows: decodes and their draft tokens
    prompt: LinearCost | None = None  # of prompt tokens
    is_decode_due: bool = False  # the next step should have no prompts, so that it can be measured

    def tokens_beside(self, factor: float, num_rows: int, num_joining: int) -> float:
        """Returns how many prompt tokens a step with `num_rows` decodes should compute at most.

        The step then takes at most `factor` times as long as a step without prompts in which
        `num_joining` more sequences decode, those of the prompts. The streams get steps of that
        length anyway as soon as the prompts are computed. The result is at least LEAST_CHUNK.
        Infinite without measurements.
        """
        if self.decode is None or self.prompt is None:
            return float("inf")
        seconds = factor * self.decode.seconds(num_rows + num_joining)
        within = self.prompt.amount(seconds - self.decode.seconds(num_rows))
        efficient = self.prompt.amount((1 + _EFFICIENT) * self.prompt.fixed)
        return max(within, efficient, LEAST_CHUNK)

    def tokens_after(self, factor: float, num_tokens: int) -> float:
        """Returns how many more prompt tokens a step without decodes should compute at most.

        A prompt ends after the first `num_tokens` of the step, and its stream begins with the end
        of the step. The step takes at most `factor` times as long as with these tokens alone, or as
        an efficient step if that is longer. Infinite without measurements.
        """
        if self.prompt is None:
            return float("inf")
        fixed = self.prompt.fixed + (self.decode.fixed if self.decode else 0.0)
        cost = LinearCost(fixed=fixed, each=self.prompt.each)
        alone = max(cost.seconds(num_tokens), _EFFICIENT * fixed)
        return max(cost.amount(factor * alone) - num_tokens, 0.0)


class StepTimes:
    """Fits a StepCost to the measured times of steps; the latest steps count most.

    A step that takes far longer than predicted counts as less long, so that one stall has little
    effect; see `LinearFit`.
    """

    def __init__(self) -> None:
        self._decode = LinearFit()
        self._prompt = LinearFit()
        # Prompt tokens and seconds of the last steps before the first step without prompts.
        self._early: deque[tuple[int, float]] = deque(maxlen=_MAX_EARLY)
        self._num_decode = 0  # measured steps without prompts
        self._num_prompt = 0  # measured steps with prompts
        self._num_mixed = 0  # mixed steps since the last step without prompts
        self._num_tokens = 0  # prompt tokens of the last step with prompts

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Adds a measured step with `num_rows` decodes, or draft tokens, and with prompt tokens."""
        if num_prompt_tokens:
            self._num_prompt += 1
            self._num_tokens = num_prompt_tokens
            self._num_mixed += num_rows > 0
            if self._num_decode:
                seconds -= self._decode.cost(_CONSTANT).seconds(num_rows)
            else:
                self._early.append((num_prompt_tokens, seconds))
            self._prompt.observe(num_prompt_tokens, max(seconds, 0.0), _PROPORTIONAL)
        elif num_rows:
            self._num_decode += 1
            self._num_mixed = 0
            self._decode.observe(num_rows, seconds, _CONSTANT)
            if self._early:
                self._prompt = LinearFit()
            for num_tokens, whole in self._early:
                # One measurement does not tell the time of a step without rows: it is shorter.
                added = max(whole - seconds, whole / 2)
                self._prompt.observe(num_tokens, added, _PROPORTIONAL)
            self._early.clear()

    def cost(self) -> StepCost:
        """Returns the current prediction."""
        most_mixed = min(_MIXED_STEPS_EACH * self._num_decode, _MAX_MIXED_STEPS)
        return StepCost(
            decode=self._decode.cost(_CONSTANT) if self._num_decode else None,
            prompt=self._prompt_cost() if self._num_prompt else None,
            is_decode_due=self._num_mixed >= most_mixed,
        )

    def _prompt_cost(self) -> LinearCost:
        cost = self._prompt.cost(_PROPORTIONAL)
        if self._num_prompt >= _TRUSTED:
            return cost
        return LinearCost(fixed=0.0, each=cost.seconds(self._num_tokens) / self._num_tokens)
