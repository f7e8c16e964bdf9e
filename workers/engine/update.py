"""Applies sampled tokens to sequences: they continue, finish, fork, or wait for a remote reader.

Knows nothing of what is computed when.
"""

from collections.abc import Sequence as Items

from . import fork
from .beam import Candidate
from .events import Event, Failed, NewTokens, PrefillFinished
from .plan import FirstTokens, SampledLogprobs
from .request_table import RequestTable
from .sequence import Search, Sequence, Task


def append_tokens(
    table: RequestTable, sequence: Sequence, tokens: list[int], logprobs: list[SampledLogprobs] | None
) -> list[Event]:
    """Appends a sequence's next token, or the first tokens of all its choices; with log probabilities of each if they
    are known."""
    if sequence.num_samples > 1:
        return _append_choices(table, sequence, tokens, logprobs)
    token = tokens[0]
    finish = sequence.append(token)
    num_generated = sequence.num_generated
    event = NewTokens(
        id=sequence.spec.id,
        first_index=sequence.spec.first_index + num_generated - 1,
        token_ids=(token,),
        finish=finish,
        prefill_seconds=table.clock() - sequence.admitted if num_generated == 1 else 0.0,
        logprobs=(logprobs[0],) if logprobs else (),
        prompt_logprobs=sequence.take_prompt_logprobs() if sequence.scores_prompt else (),
    )
    if finish is not None:
        table.end(sequence)
    elif sequence.spec.task is Task.PREFILL:
        return [event, _lease(table, sequence, FirstTokens(tokens=(token,)))]
    return [event]


def advance_search(table: RequestTable, search: Search, candidates: Items[Items[Candidate]]) -> list[Event]:
    """Advances a beam search by the candidates of each beam: to its next beams, or to its end and hypotheses."""
    first = search.members[0]
    if first.spec.task is Task.PREFILL:
        tokens, logprobs = zip(*candidates[0], strict=True)
        return [_lease(table, first, FirstTokens(tokens=tokens, logprobs=logprobs))]
    is_start = first.num_generated == 0
    if is_start:
        search.prefill_seconds = table.clock() - first.admitted
    moves = search.beams.advance(candidates)
    if not moves:
        return _finish_search(table, search)
    family, growth = [first], fork.growth_each(first)

    def new_beam(parent: Sequence) -> Sequence:
        spec = search.member_spec().choice(len(family))
        family.append(fork.branch(table.pool, parent, spec, growth))
        return family[-1]

    search.members, idle = fork.rearrange(table.pool, search.members, moves, new_beam)
    if is_start:
        table.fork(family, first.spec.choice(0), growth)
    for member in idle:
        table.end(member)
    return []


def _append_choices(
    table: RequestTable, sequence: Sequence, tokens: list[int], logprobs: list[SampledLogprobs] | None
) -> list[Event]:
    """Forks a sequence into the choices that their first token does not finish."""
    events: list[Event] = []
    seconds = table.clock() - sequence.admitted
    for choice in sequence.choices.copy():
        finish = sequence.spec.finish_reason(tokens[choice], 1)
        event = NewTokens(
            id=sequence.spec.id + choice,
            first_index=sequence.spec.first_index,
            token_ids=(tokens[choice],),
            finish=finish,
            prefill_seconds=seconds,
            logprobs=(logprobs[choice],) if logprobs else (),
            prompt_logprobs=sequence.take_prompt_logprobs(),
        )
        events.append(event)
        if finish is not None:
            sequence.choices.remove(choice)
    if not sequence.choices:
        table.end(sequence)
    elif sequence.spec.task is Task.PREFILL:
        events.append(_lease(table, sequence, FirstTokens(tokens=tuple(tokens))))
    else:
        _fork_choices(table, sequence, tokens)
    return events


def _fork_choices(table: RequestTable, sequence: Sequence, tokens: list[int]) -> None:
    """Lets the first remaining choice continue with the sequence's own blocks, and branches the others off."""
    spec, growth, choices = sequence.spec, fork.growth_each(sequence), sequence.choices
    others = [fork.branch(table.pool, sequence, spec.choice(choice), growth) for choice in choices[1:]]
    if choices[0]:
        table.dropped.append(spec.id)
    if choices[0] or spec.sampling.needs_history:  # of several samples the ranks do not know which is whose
        sequence.forget_sent()
    table.fork([sequence, *others], spec.choice(choices[0]), growth)
    for member, choice in zip([sequence, *others], choices, strict=True):
        member.append(tokens[choice])


def _lease(table: RequestTable, sequence: Sequence, first_tokens: FirstTokens) -> PrefillFinished:
    table.lease(sequence)
    seconds = table.clock() - sequence.admitted
    return PrefillFinished(id=sequence.spec.id, first_tokens=first_tokens, prefill_seconds=seconds)


def _finish_search(table: RequestTable, search: Search) -> list[Event]:
    """Reports the best hypotheses; there are too few where a model has hardly more tokens than beams."""
    spec = search.spec
    events: list[Event] = []
    best = search.beams.best(spec.num_choices)
    for number in search.choices:
        if number >= len(best):
            reason = f"beam_search: only {len(best)} hypotheses exist"
            events.append(Failed(id=spec.id + number, reason=reason))
            continue
        tokens, score = best[number]
        event = NewTokens(
            id=spec.id + number,
            first_index=spec.first_index,
            token_ids=tokens,
            finish=spec.finish_reason(tokens[-1], len(tokens)),
            prefill_seconds=search.prefill_seconds,
            score=score,
        )
        events.append(event)
    table.end_search(search)
    return events
