"""What becomes of sequences when their next tokens are known: they go on, end, fork, or wait for a remote reader.

Knows nothing of what is computed when.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from . import fork
from .beam import Candidate
from .events import Event, Failed, PrefillFinished, Token
from .plan import FirstTokens, SampledLogprobs
from .request_table import RequestTable
from .sequence import Search, Sequence, Task


@dataclass(frozen=True, slots=True)
class OutputUpdate:
    """Books tokens and tells of them."""

    ledger: RequestTable
    clock: Callable[[], float]

    def take(self, sequence: Sequence, tokens: list[int], logprobs: list[SampledLogprobs] | None) -> list[Event]:
        """The next token, or the first ones of all choices; with log probabilities of each if they are known."""
        if sequence.num_draws > 1:
            return self._take_choices(sequence, tokens, logprobs)
        token = tokens[0]
        finish = sequence.append(token)
        num_generated = sequence.num_generated
        event = Token(
            id=sequence.spec.id,
            index=sequence.spec.first_index + num_generated - 1,
            token=token,
            finish=finish,
            prefill_seconds=self.clock() - sequence.admitted if num_generated == 1 else 0.0,
            logprobs=logprobs[0] if logprobs else None,
            prompt_logprobs=sequence.take_prompt_logprobs() if sequence.scores_prompt else (),
        )
        if finish is not None:
            self.ledger.end(sequence)
        elif sequence.spec.task is Task.PREFILL:
            return [event, self._lease(sequence, FirstTokens(tokens=(token,)))]
        return [event]

    def advance(self, search: Search, candidates: list[Items[Candidate]]) -> list[Event]:
        """The candidates of each beam: the search goes on with its next beams or ends with its hypotheses."""
        leader = search.members[0]
        if leader.spec.task is Task.PREFILL:
            tokens, logprobs = zip(*candidates[0], strict=True)
            return [self._lease(leader, FirstTokens(tokens=tokens, logprobs=logprobs))]
        is_opening = leader.num_generated == 0
        if is_opening:
            search.prefill_seconds = self.clock() - leader.admitted
        moves = search.beams.advance(candidates)
        if not moves:
            return self._conclude(search)
        family, growth = [leader], fork.growth_each(leader)

        def new_beam(parent: Sequence) -> Sequence:
            spec = search.member_spec().choice(len(family))
            family.append(fork.branch(self.ledger.pool, parent, spec, growth))
            return family[-1]

        search.members, idle = fork.rearrange(self.ledger.pool, search.members, moves, new_beam)
        if is_opening:
            self.ledger.settle(family, leader.spec.choice(0), growth)
        for member in idle:
            self.ledger.end(member)
        return []

    def _take_choices(
        self, sequence: Sequence, tokens: list[int], logprobs: list[SampledLogprobs] | None
    ) -> list[Event]:
        """Those that their first token does not end become sequences."""
        events: list[Event] = []
        seconds = self.clock() - sequence.admitted
        for choice in sequence.choices.copy():
            finish = sequence.spec.ending(tokens[choice], 1)
            event = Token(
                id=sequence.spec.id + choice,
                index=sequence.spec.first_index,
                token=tokens[choice],
                finish=finish,
                prefill_seconds=seconds,
                logprobs=logprobs[choice] if logprobs else None,
                prompt_logprobs=sequence.take_prompt_logprobs(),
            )
            events.append(event)
            if finish is not None:
                sequence.choices.remove(choice)
        if not sequence.choices:
            self.ledger.end(sequence)
        elif sequence.spec.task is Task.PREFILL:
            events.append(self._lease(sequence, FirstTokens(tokens=tuple(tokens))))
        else:
            self._fork(sequence, tokens)
        return events

    def _fork(self, sequence: Sequence, tokens: list[int]) -> None:
        """The first choice that is left goes on with the sequence's own blocks."""
        pool, spec, growth = self.ledger.pool, sequence.spec, fork.growth_each(sequence)
        choices = sequence.choices
        others = [fork.branch(pool, sequence, spec.choice(choice), growth) for choice in choices[1:]]
        if choices[0]:
            self.ledger.dropped.append(spec.id)
        if choices[0] or spec.sampling.needs_history:  # of several draws the ranks do not know whose is whose
            sequence.forget_sent()
        self.ledger.settle([sequence, *others], spec.choice(choices[0]), growth)
        for member, choice in zip([sequence, *others], choices, strict=True):
            member.append(tokens[choice])

    def _lease(self, sequence: Sequence, opening: FirstTokens) -> PrefillFinished:
        self.ledger.lease(sequence)
        return PrefillFinished(id=sequence.spec.id, opening=opening, prefill_seconds=self.clock() - sequence.admitted)

    def _conclude(self, search: Search) -> list[Event]:
        """The best hypotheses, token by token; there are too few where a model has hardly more tokens than beams."""
        spec = search.spec
        events: list[Event] = []
        best = search.beams.best(spec.num_choices)
        for number in search.choices:
            if number >= len(best):
                reason = f"beam_search: only {len(best)} hypotheses exist"
                events.append(Failed(id=spec.id + number, reason=reason))
                continue
            hypothesis = best[number]
            last = len(hypothesis.tokens) - 1
            events += [
                Token(
                    id=spec.id + number,
                    index=spec.first_index + index,
                    token=token,
                    finish=spec.ending(token, last + 1) if index == last else None,
                    prefill_seconds=0.0 if index else search.prefill_seconds,
                    score=hypothesis.score if index == last else 0.0,
                )
                for index, token in enumerate(hypothesis.tokens)
            ]
        self.ledger.end_search(search)
        return events
