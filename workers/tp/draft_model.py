"""Proposes the next tokens of sequences by a second, small model, whose proposals a step of the
first one verifies.

After speculative decoding (arXiv 2211.17192). What it proposes changes no token, so its KV cache
may be as wrong as it
likes: nothing here tells other modules what it holds.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from ..engine.plan import (
    Constrained,
    DraftRequest,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from ..model.runner import ModelRunner

_CATCH_UP_TOKENS: Final = (
    256  # of one call, so that a long prompt delays the streams beside it little
)


@dataclass(slots=True, eq=False)
class _Held:
    """Holds what the draft model has computed of a sequence: known tokens, and after them proposed
    ones.
    """

    num_known: int = 0
    proposed: list[int] = field(default_factory=list)
    num_blocks: int = 0  # of the sequence's block table that it knows

    def confirm(self, tokens: Sequence[int]) -> int:
        """Takes the proposed tokens that `tokens`, all known ones, have, too, and forgets the
        others. Returns how many are computed, but for the last one, which has to be computed for
        what follows it.
        """
        most = len(tokens) - 1
        pairs = zip(self.proposed, tokens[self.num_known : most], strict=False)
        self.num_known += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.num_known = min(self.num_known, most)
        self.proposed.clear()
        return self.num_known


class DraftingExecutor(Executor):
    """Executes plans on another executor, and proposes tokens by a draft model. Used as that is.

    The draft model's KV cache has the block numbers of the other one, so it has no blocks of its
    own to account for. It computes each sequence from its first token on, whatever of it was
    cached, imported or restored for the other.
    """

    def __init__(self, executor: Executor, model: ModelRunner) -> None:
        """`model` has the vocabulary, the blocks and the block size of the executor's."""
        self._executor = executor
        self._model = model
        self._held: dict[int, _Held] = {}

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`."""
        dropped = tuple(number for number in plan.dropped if self._held.pop(number, None))
        if dropped:
            self._model.execute(StepPlan(sequences=(), dropped=dropped))
        return self._executor.launch(plan, on_layers)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        """See `Executor.prepare_masks`."""
        return self._executor.prepare_masks(sequences, seconds)

    def expedite(self) -> None:
        """See `Executor.expedite`."""
        self._executor.expedite()

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """See `Executor.propose`. A sequence whose tokens are not computed yet, since there are
        many, has none.
        """
        budget = _CATCH_UP_TOKENS
        steps, proposed = [], dict[int, list[int]]()
        longest = self._model.config.max_position_embeddings
        for request in requests:
            held = self._held.setdefault(request.sequence_id, _Held())
            start = held.confirm(request.tokens)
            end = min(len(request.tokens), start + budget)
            if end == start or len(request.tokens) + request.count > longest:
                continue
            budget -= end - start
            if end == len(request.tokens):
                proposed[request.sequence_id] = []
            steps.append(
                self._step(request, start, request.tokens[start:end], end == len(request.tokens))
            )
            held.num_known = end
        by_id = {request.sequence_id: request for request in requests}
        while steps:
            tokens = iter(self._model.execute(StepPlan(sequences=tuple(steps), dropped=())))
            sampled = [
                (by_id[step.sequence_id], next(tokens)) for step in steps if step.num_samples
            ]
            steps = []
            for request, token in sampled:
                if token < 0:  # the draft model's logits are not finite
                    continue
                own = proposed[request.sequence_id]
                own.append(token)
                if len(own) < request.count:
                    steps.append(
                        self._step(request, len(request.tokens) + len(own) - 1, (token,), True)
                    )
                    self._held[request.sequence_id].proposed.append(token)
        return {number: tuple(tokens) for number, tokens in proposed.items()}

    def _step(
        self, request: DraftRequest, start: int, tokens: Sequence[int], samples: bool
    ) -> SequenceStep:
        """Returns the step that computes `tokens`, which begin at the position `start`."""
        held, blocks = self._held[request.sequence_id], request.blocks
        step = SequenceStep(
            sequence_id=request.sequence_id,
            token_ids=tuple(tokens),
            start=start,
            new_blocks=tuple(blocks[held.num_blocks :]),
            sampling=None if held.num_blocks else _own_sampling(request.sampling),
            num_samples=int(samples),
        )
        held.num_blocks = len(blocks)
        return step


def _own_sampling(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters that a proposal is sampled with: with the noise that the token will be
    sampled with, it is right more often than the likeliest token. What depends on earlier tokens is
    left out.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
    )
