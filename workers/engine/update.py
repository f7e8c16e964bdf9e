"""Applies the samples of a step to its sequences: they continue, finish, fork, or become leases.

Knows nothing of scheduling.
"""

from collections.abc import Sequence as Items

from . import fork
from .beam import Candidate
from .events import Event, Failed, NewTokens, PrefillFinished, Progress
from .plan import FirstTokens, SampledLogprobs, Samples, SequenceStep, StepPlan
from .request_table import RequestTable
from .sequence import Search, Sequence, Task


def update(table: RequestTable, plan: StepPlan, samples: Samples) -> list[Event]:
    """Applies the samples of a step and returns the events.

    Steps must be updated in the order in which they were scheduled. Drops the samples of sequences
    that have ended since.
    """
    num_samples = sum([step.num_samples for step in plan.sequences])
    if len(samples.tokens) != num_samples:
        raise RuntimeError(f"{len(samples.tokens)} samples; {num_samples} were planned")
    events: list[Event] = []
    searches: list[Search] = []
    end = 0
    for step in plan.sequences:
        start = end
        end += step.num_samples
        sequence = table.sequences.get(step.sequence_id)
        if sequence is None:
            continue
        if step.sequence_id in samples.failed:
            events += _fail_step(table, sequence, step, samples.failed[step.sequence_id])
            continue
        logprobs = samples.logprobs.get(step.sequence_id)
        if step.num_draft:
            events.append(_accept_draft(table, sequence, step, samples.tokens[start:end], logprobs))
            continue
        sequence.num_computed += len(step.token_ids)
        _publish(table, sequence)
        if sequence.scores_prompt:
            sequence.prompt_logprobs += samples.prompt_logprobs.get(step.sequence_id, ())
        if sequence.spec.task is Task.PREFILL:
            events.append(Progress(id=step.sequence_id, num_computed=sequence.num_computed))
        if start == end:
            continue
        if sequence.search is None:
            embedding = samples.embeddings.get(step.sequence_id, ())
            events += append_tokens(table, sequence, samples.tokens[start:end], logprobs, embedding)
        elif sequence.search not in searches:
            searches.append(sequence.search)
    for search in searches:
        if search.spec.id not in table.searches:  # a later beam of the step has failed
            continue
        candidates = [samples.logprobs[member.spec.id][0].top for member in search.members]
        events += advance_search(table, search, candidates)
    return events


def _publish(table: RequestTable, sequence: Sequence) -> None:
    """Publishes the blocks and states that a step has completed, and begins their retentions."""
    if sequence.num_computed >= sequence.next_publish:
        table.publish(sequence)
    if sequence.slots.points:
        table.states.publish(sequence)
    table.retain(sequence)


def _fail_step(
    table: RequestTable, sequence: Sequence, step: SequenceStep, reason: str
) -> list[Event]:
    """Ends a sequence whose samples are invalid; only drops the draft if the step verified one."""
    if step.num_draft:
        sequence.forgo_drafts()
        table.states.settle(sequence)
        return []
    return [Failed(id=number, reason=reason) for number in table.abort(sequence)]


def append_tokens(
    table: RequestTable,
    sequence: Sequence,
    tokens: Items[int],
    logprobs: Items[SampledLogprobs] | None,
    embedding: Items[float] = (),
) -> list[Event]:
    """Appends the sampled token to a sequence, or forks it by the first tokens of its choices.

    `tokens` has one token for each choice. Choices that their token finishes do not become
    sequences. `logprobs` has one entry for each of `tokens`, if requested. `embedding` belongs to
    the prompt and is empty unless requested.
    """
    spec = sequence.spec
    num_generated = sequence.num_generated + 1
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
    """Appends the accepted draft tokens and the token after them, up to a finishing token."""
    spec = sequence.spec
    index = sequence.num_generated
    tokens = samples[: step.num_accepted(samples) + 1]
    reasons = [
        spec.finish_reason(token, index + number) for number, token in enumerate(tokens, start=1)
    ]
    finish = next(filter(None, reasons), None)
    if finish is not None:
        tokens = tokens[: reasons.index(finish) + 1]
    sequence.accept(tokens)
    table.publish(sequence)
    table.states.settle(sequence)
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
    """Advances a beam search by the candidates of each beam, to its next beams or to its end.

    A PREFILL is leased with the candidates instead.
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
    family = [first]
    growth = fork.growth_each(first)

    def new_beam(parent: Sequence) -> Sequence:
        spec = search.member_spec().choice(len(family))
        family.append(fork.branch(table.pool, table.states.pool, parent, spec, growth))
        return family[-1]

    search.members, idle = fork.rearrange(
        table.pool, table.states.pool, search.members, moves, new_beam
    )
    if is_start:
        table.fork(family, first.spec.choice(0), growth)
    for member in idle:
        table.end(member)
    return []


def _fork_choices(table: RequestTable, sequence: Sequence, tokens: Items[int]) -> None:
    """Forks a sequence into its choices; the first remaining choice keeps the sequence's blocks."""
    spec = sequence.spec
    growth = fork.growth_each(sequence)
    choices = sequence.choices
    others = [
        fork.branch(table.pool, table.states.pool, sequence, spec.choice(choice), growth)
        for choice in choices[1:]
    ]
    if choices[0]:
        table.dropped.append(spec.id)
    # The ranks do not know which of several samples belongs to which choice.
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
    """Ends a beam search and reports its best hypotheses.

    There are too few hypotheses if a model has hardly more tokens than the search has beams.
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
