"""Applies what a step computed to its sequences: they continue, finish, fork, or wait for a remote
reader.

Knows nothing of what is computed when.
"""

from collections.abc import Sequence as Items

from . import fork
from .beam import Candidate
from .events import Event, Failed, NewTokens, PrefillFinished, Progress
from .plan import FirstTokens, SampledLogprobs, Samples, SequenceStep, StepPlan
from .request_table import RequestTable
from .sequence import Search, Sequence, Task


def update(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
    """Applies what a step computed, in the order in which steps were scheduled. Drops what it
    computed for sequences that have ended since.
    """
    num_samples = sum([step.num_samples for step in plan.sequences])
    if len(samples.tokens) != num_samples:
        raise RuntimeError(f"{len(samples.tokens)} samples; {num_samples} were planned")
    events: list[Event] = []
    searches: list[Search] = []
    block_size, end = table.config.block_size, 0
    for step in plan.sequences:
        start, end = end, end + step.num_samples
        sequence = table.sequences.get(step.sequence_id)
        if sequence is None:
            continue
        if step.sequence_id in samples.failed:
            if step.num_draft:
                sequence.forgo_drafts()
            else:
                reason = samples.failed[step.sequence_id]
                events += [Failed(id=number, reason=reason) for number in table.abort(sequence)]
            continue
        if step.num_draft:
            logprobs = samples.logprobs.get(step.sequence_id)
            events.append(_accept_draft(table, sequence, step, samples.tokens[start:end], logprobs))
            continue
        sequence.num_computed += len(step.token_ids)
        if sequence.num_computed >= (sequence.num_published + 1) * block_size:
            table.publish(sequence)
        if sequence.scores_prompt:
            sequence.prompt_logprobs += samples.prompt_logprobs.get(step.sequence_id, ())
        if sequence.spec.task is Task.PREFILL:
            events.append(Progress(id=step.sequence_id, num_computed=sequence.num_computed))
        if start == end:
            continue
        if sequence.search is None:
            logprobs = samples.logprobs.get(step.sequence_id)
            embedding = samples.embeddings.get(step.sequence_id, ())
            events += append_tokens(table, sequence, samples.tokens[start:end], logprobs, embedding)
        elif sequence.search not in searches:
            searches.append(sequence.search)
    for search in searches:
        candidates = [samples.logprobs[member.spec.id][0].top for member in search.members]
        events += advance_search(table, search, candidates)
    return events


def append_tokens(
    table: RequestTable,
    sequence: Sequence,
    tokens: Items[int],
    logprobs: Items[SampledLogprobs] | None,
    embedding: Items[float] = (),
) -> list[Event]:
    """Continues a sequence with its next token; one of several choices, which then have their first
    tokens, forks into those that this does not finish. `logprobs`: one for each of `tokens`, if
    they are known; `embedding`: of the prompt, if it is requested.
    """
    spec, num_generated = sequence.spec, sequence.num_generated + 1
    seconds = table.clock() - sequence.started if num_generated == 1 else 0.0
    events: list[Event] = []
    for choice in sequence.choices.copy():
        finish = spec.finish_reason(tokens[choice], num_generated)
        event = NewTokens(
            id=spec.id + choice,
            first_index=spec.first_index + num_generated - 1,
            token_ids=(tokens[choice],),
            finish=finish,
            prefill_seconds=seconds,
            logprobs=(logprobs[choice],) if logprobs else (),
            prompt_logprobs=sequence.take_prompt_logprobs() if sequence.scores_prompt else (),
            embedding=tuple(embedding),
        )
        events.append(event)
        if finish is not None:
            sequence.choices.remove(choice)
    if not sequence.choices:
        table.end(sequence)
    elif spec.task is Task.PREFILL:
        events.append(_lease(table, sequence, FirstTokens(tokens=tuple(tokens))))
    elif sequence.num_samples > 1:
        _fork_choices(table, sequence, tokens)
    else:
        sequence.tokens.append(tokens[0])
    return events


def _accept_draft(
    table: RequestTable,
    sequence: Sequence,
    step: SequenceStep,
    samples: Items[int],
    logprobs: Items[SampledLogprobs] | None,
) -> NewTokens:
    """Continues a sequence with the tokens of its draft that are right and the one after them, or
    up to the one that finishes it.
    """
    spec, index = sequence.spec, sequence.num_generated
    tokens = samples[: step.num_accepted(samples) + 1]
    reasons = [
        spec.finish_reason(token, index + number) for number, token in enumerate(tokens, start=1)
    ]
    finish = next(filter(None, reasons), None)
    if finish is not None:
        tokens = tokens[: reasons.index(finish) + 1]
    sequence.accept(tokens)
    table.publish(sequence)
    table.num_draft_tokens += step.num_draft
    table.num_accepted_tokens += len(tokens) - 1
    if finish is not None:
        table.end(sequence)
    return NewTokens(
        id=spec.id,
        first_index=spec.first_index + index,
        token_ids=tuple(tokens),
        finish=finish,
        prefill_seconds=0.0,
        logprobs=tuple(logprobs[: len(tokens)]) if logprobs else (),
        num_draft_tokens=step.num_draft,
    )


def advance_search(
    table: RequestTable, search: Search, candidates: Items[Items[Candidate]]
) -> list[Event]:
    """Advances a beam search by the candidates of each beam: to its next beams, or to its end and
    hypotheses.
    """
    first = search.members[0]
    if first.spec.task is Task.PREFILL:
        tokens, logprobs = zip(*candidates[0], strict=True)
        return [_lease(table, first, FirstTokens(tokens=tokens, logprobs=logprobs))]
    is_start = first.num_generated == 0
    if is_start:
        search.prefill_seconds = table.clock() - first.started
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


def _fork_choices(table: RequestTable, sequence: Sequence, tokens: Items[int]) -> None:
    """Lets the first remaining choice continue with the sequence's own blocks, and branches the
    others off.
    """
    spec, growth, choices = sequence.spec, fork.growth_each(sequence), sequence.choices
    others = [
        fork.branch(table.pool, sequence, spec.choice(choice), growth) for choice in choices[1:]
    ]
    if choices[0]:
        table.dropped.append(spec.id)
    # of several samples the ranks do not know which is whose
    if choices[0] or spec.sampling.needs_history:
        sequence.forget_sent()
    table.fork([sequence, *others], spec.choice(choices[0]), growth)
    for member, choice in zip([sequence, *others], choices, strict=True):
        member.tokens.append(tokens[choice])


def _lease(table: RequestTable, sequence: Sequence, first_tokens: FirstTokens) -> PrefillFinished:
    table.lease(sequence)
    seconds = table.clock() - sequence.started
    return PrefillFinished(id=sequence.spec.id, first_tokens=first_tokens, prefill_seconds=seconds)


def _finish_search(table: RequestTable, search: Search) -> list[Event]:
    """Reports the best hypotheses; there are too few where a model has hardly more tokens than
    beams.
    """
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
