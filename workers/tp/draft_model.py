"""Proposes the next tokens of sequences by a second, small model; a step verifies them.

This is speculative decoding (arXiv 2211.17192). A proposal never changes the tokens of a sequence,
so the draft model's KV cache may be wrong. Other modules know nothing of that cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from ..engine.plan import (
    DelegatingExecutor,
    DraftRequest,
    Executor,
    OnLayers,
    Samples,
    SamplingParams,
    SequenceStep,
    StepPlan,
)
from ..kv_cache.tables import TableBlocks
from ..model.runner import ModelRunner

# Known tokens that one call computes at most, so that a long prompt delays other streams little.
_CATCH_UP_TOKENS: Final = 256


@dataclass(slots=True, eq=False)
class _Held:
    """Holds the tokens of a sequence that the draft model has computed.

    First come `num_known` known tokens, then proposed ones.
    """

    num_known: int = 0
    proposed: list[int] = field(default_factory=list)
    num_blocks: int = 0  # blocks of the sequence's table that the draft model knows

    def confirm(self, tokens: Sequence[int]) -> int:
        """Keeps the longest proposed prefix that matches `tokens`; returns the number computed.

        `tokens` are all known tokens of the sequence. The last one never counts as computed: it is
        computed again, because its logits are needed. The other proposed tokens are dropped.
        """
        most = len(tokens) - 1
        pairs = zip(self.proposed, tokens[self.num_known : most], strict=False)
        self.num_known += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.num_known = min(self.num_known, most)
        self.proposed.clear()
        return self.num_known


class DraftingExecutor(DelegatingExecutor):
    """Executes plans on another executor, and proposes tokens by a draft model.

    It is used by the same thread and in the same way as that executor. The draft model's KV cache
    uses the block numbers of the other model, so it has no blocks of its own to account for. The
    draft model computes each sequence from its first token, even if the other model's KV cache was
    cached, imported or loaded from a tier.
    """

    def __init__(self, executor: Executor, model: ModelRunner) -> None:
        """Requires a `model` with the executor's vocabulary, number of blocks and block size."""
        super().__init__(executor)
        self._model = model
        self._held: dict[int, _Held] = {}

    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        dropped = tuple(number for number in plan.dropped if self._held.pop(number, None))
        if dropped:
            self._model.execute(StepPlan(sequences=(), dropped=dropped))
        return self._executor.launch(plan, on_layers)

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        """Proposes tokens for each request; see `Executor.propose`.

        Computes at most _CATCH_UP_TOKENS known tokens in one call. A sequence whose known tokens
        are not all computed by then gets no proposal.
        """
        budget = _CATCH_UP_TOKENS
        steps: list[SequenceStep] = []
        proposed: dict[int, list[int]] = {}
        for request in requests:
            held = self._held.setdefault(request.sequence_id, _Held())
            start = held.confirm(request.tokens)
            end = min(len(request.tokens), start + budget)
            if end == start:
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
        held = self._held[request.sequence_id]
        blocks = request.blocks
        first = held.num_blocks
        step = SequenceStep(
            sequence_id=request.sequence_id,
            token_ids=tuple(tokens),
            start=start,
            new_blocks=(TableBlocks(tuple(blocks[first:]), first),) if first < len(blocks) else (),
            sampling=None if held.num_blocks else _own_sampling(request.sampling),
            num_samples=int(samples),
        )
        held.num_blocks = len(blocks)
        return step


def _own_sampling(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters for sampling a proposal.

    A proposal uses the same noise as the later token, so it is right more often than the most
    likely token. Parameters that depend on earlier tokens are left out.
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
