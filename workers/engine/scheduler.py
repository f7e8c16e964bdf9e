"""Decides which tokens of which sequences the next step computes, and gives them blocks.

One scheduler serves prefill, decode and mixed steps: it only asks whether a sequence has tokens to
compute. Touches no tensor and no network. One file because the parts of a step share its
budgets, and the order in which sequences get and lose blocks.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import replace
from math import inf

from ..kv_cache.tables import TableBlocks
from ..step_cost import StepCost
from .block_table import NUM_STATES, PREFILL_STATES, least_blocks
from .events import Admitted, Event, NewTokens, Preempted, Suspended
from .fork import take_new_blocks
from .ngram import Drafter
from .plan import PENDING_TOKEN, Constrained, DraftRequest, SequenceStep, StepPlan
from .request_table import RequestTable
from .resume import Hit
from .sequence import Sequence, SequenceSpec, State, Task
from .update import advance_search, append_tokens


class Scheduler:
    """Schedules by continuous batching (Orca, OSDI 2022) with chunked prefill.

    Chunked prefill follows Sarathi-Serve (arXiv 2403.02310). A step first takes every running
    sequence that needs only its next token. Then it takes chunks of prompts by
    `SequenceSpec.order`. Among equal prompts, running ones come first, in order of admission; then
    come prompts from the queue, in order of arrival. The head of the queue waits until its blocks
    are free, and no sequence behind it overtakes it. A DECODE at the head does not wait for running
    prompts, because its import takes no part of a step. A prompt that resumes an interrupted stream
    shares its steps with no new prompt, because the stream would wait for the new prompt's tokens.
    Not thread-safe.

    A step may be scheduled before the last one is updated (see `Sequence` for the counters). A
    sequence that ends meanwhile returns its blocks at once, although the step in flight still
    writes to them. This is safe because steps run in order, so the next owner's writes come later.
    The token that this step samples is dropped.

    The choices of a request are one sequence until their first tokens are known, and so are the
    beams of a search. The blocks that they will need are reserved from the start (see `fork`).

    A sequence whose grammar mask is not ready skips the step, so that no other sequence waits.

    With `speculative`, a step may verify a draft of a sequence's next tokens. With n-grams the
    sequence must repeat itself; a draft model drafts for any sequence. No drafts are made while
    there are many sequences. The next step of a drafted sequence is planned after its update.
    """

    def __init__(
        self,
        requests: RequestTable,
        prepare_masks: Callable[[Items[Constrained]], Collection[int]],
        count_importable: Callable[[Items[bytes]], int],
        propose: Callable[[Items[DraftRequest]], dict[int, tuple[int, ...]]],
    ) -> None:
        """Makes a scheduler for the sequences of `requests`.

        `prepare_masks` returns the ids of the sequences whose grammar masks are ready.
        `count_importable` returns the number of leading blocks of a hash chain to import. `propose`
        returns the drafts of a draft model by sequence id.
        """
        self._prepare_masks = prepare_masks
        self._count_importable = count_importable
        self._propose = propose
        self.pool = requests.pool
        self._requests = requests
        self._config = requests.config
        # Those of the worker's role; never above the budgets of the configuration.
        self.budgets = requests.config.budgets
        self._speculative = self.budgets.speculative
        self._has_states = self._config.num_states > 0
        # The ids of the beam searches that wait for an import to end, see `_grow`.
        self._stalled: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Returns True if there is something to schedule or to update.

        Imports that wait for their KV cache do not count as work, nor do searches that wait for
        their end.
        """
        requests = self._requests
        if requests.committed or requests.dropped or self._can_admit():
            return True
        if not self._stalled or not requests.is_importing:
            return bool(requests.running)
        return not all(map(self._is_stalled, requests.running))

    def fits(self, spec: SequenceSpec) -> bool:
        """Returns True if the sequence could run on an otherwise empty worker."""
        num_branches = 1 if spec.task is Task.PREFILL else spec.num_choices
        least = sum(
            least_blocks(
                table,
                self._requests.limits,
                num_tokens=len(spec.tokens),
                max_length=spec.max_length,
                is_computed=spec.task is not Task.DECODE,
                num_branches=num_branches,
                is_search=spec.beam is not None and num_branches > 1,
            )
            for table in self._config.tables
        )
        if self.num_states(spec) > self._config.num_states:
            return False
        return num_branches <= self.budgets.max_sequences and least <= self._config.num_blocks

    def num_states(self, spec: SequenceSpec) -> int:
        """Returns the number of states that a sequence needs; 0 if the model keeps none."""
        if not self._config.num_states:
            return 0
        return PREFILL_STATES if spec.task is Task.PREFILL else NUM_STATES * spec.num_choices

    def schedule(self, cost: StepCost = StepCost()) -> tuple[StepPlan, list[Event]]:
        """Plans the next step while at most one step is in flight.

        `cost` predicts its time; it counts if `mixed_step_factor` is set. Preempts the newest
        running sequences when an older one needs a block and none is free.
        """
        self._requests.end_retentions()
        events = self._start_committed()
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        suspended: list[Sequence] = []
        late = self._find_late()
        # With more sequences there is no room for a draft.
        may_await = (
            self._speculative is not None
            and len(self._requests.running) < self._speculative.max_step_tokens
        )
        for sequence in self._requests.running:
            if sequence.spec.id in late:
                continue
            if num_unscheduled := sequence.num_unscheduled:
                if may_await and self._awaits_token(sequence):
                    continue
                if num_unscheduled == 1:
                    decodes.append(sequence)
                else:
                    prompts.append(sequence)
            elif sequence.is_suspended:
                suspended.append(sequence)
        events += map(self._lease, suspended)
        # Before any sequence has its step, so that either all beams of a search grow or none.
        self._stalled.clear()
        for sequence in decodes:
            if sequence.num_scheduled == sequence.num_covered or (
                self._has_states and not sequence.slots.free
            ):
                events += self._grow(sequence)
        copies: list[tuple[int, int]] = []
        decodes = [
            sequence
            for sequence in decodes
            if sequence.state is State.RUNNING and not self._is_stalled(sequence)
        ]
        drafts = self._draft(decodes, prompts)
        steps = [
            self._step(sequence, 1, copies, drafts.get(sequence.spec.id, ()))
            for sequence in decodes
        ]
        is_expedited = self._add_prompts(cost, steps, prompts, copies, events)
        events += self._admit_imports()
        return self._plan(steps, copies, is_expedited), events

    def _add_prompts(
        self,
        cost: StepCost,
        steps: list[SequenceStep],
        prompts: list[Sequence],
        copies: list[tuple[int, int]],
        events: list[Event],
    ) -> bool:
        """Adds chunks of prompts to the `steps` of the decodes.

        Returns True if one of them resumes an interrupted stream.
        """
        num_decodes = len(steps)
        num_admissible = self._num_admissible() if self.budgets.burst_chunks else 0
        budget = self.budgets.prompt_tokens(
            cost,
            num_decodes=num_decodes,
            num_rows=sum(len(step.token_ids) for step in steps),
            num_prompts=len(prompts) + len(self._requests.waiting),
            num_starting=len(prompts) + num_admissible,
        )
        num_sampled = sum(step.num_samples for step in steps)
        num_rows_left = self._config.budgets.max_step_rows - num_sampled
        # The first prompt that ends may sample more, because decodes may never leave so many rows.
        is_first = all(step.num_samples <= 1 + step.num_draft for step in steps)
        prompts.sort(key=lambda sequence: sequence.spec.order)
        is_expedited = False
        while budget > 0:
            prompt = self._next_prompt(prompts, inf if is_first else num_rows_left, events)
            if prompt is None:
                break
            count = self._extend(prompt, min(prompt.num_unscheduled, budget))
            if not count:
                events += map(_preempted, self._requests.abort(prompt))
                continue
            step = self._step(prompt, count, copies)
            steps.append(step)
            budget -= count
            num_rows_left -= step.num_samples
            is_first &= not step.num_samples
            if not num_decodes and len(steps) == 1:
                budget = self.budgets.more_prompt_tokens(cost, count, budget)
            is_expedited |= prompt.spec.is_recovery
            if prompt.spec.is_recovery and not self._is_next_recovery(prompts):
                break
        return is_expedited

    def _plan(
        self, steps: list[SequenceStep], copies: list[tuple[int, int]], is_expedited: bool
    ) -> StepPlan:
        """Returns the plan of these steps, with the copies and drops that come before them."""
        saved, loaded = self.pool.host.take_copies()
        saved_states, loaded_states = self._requests.states.pool.host.take_copies()
        plan = StepPlan(
            sequences=tuple(steps),
            dropped=tuple(self._requests.dropped),
            copies=tuple(copies),
            saved=saved,
            loaded=loaded,
            saved_states=saved_states,
            loaded_states=loaded_states,
            unloaded=self._requests.take_unloaded(),
            is_expedited=is_expedited,
        )
        self._requests.dropped.clear()
        # Not before admission: an import writes to its blocks at once.
        self.pool.release([source for source, _ in copies])
        self._requests.states.release_read()
        return plan

    def _start_committed(self) -> list[Event]:
        """Applies the first tokens of committed imports.

        Reports only tokens that finish their choice, because the worker that sampled the tokens has
        reported them already.
        """
        events: list[Event] = []
        for sequence, first_tokens in self._requests.committed:
            if sequence.state is not State.RUNNING:
                continue
            if sequence.search:
                candidates = list(zip(first_tokens.tokens, first_tokens.logprobs, strict=True))
                events += advance_search(self._requests, sequence.search, [candidates])
            else:
                appended = append_tokens(self._requests, sequence, list(first_tokens.tokens), None)
                events += [
                    event
                    for event in appended
                    if isinstance(event, NewTokens) and event.finish is not None
                ]
        self._requests.committed.clear()
        return events

    def _find_late(self) -> set[int]:
        """Returns the ids of the running sequences whose masks are not ready."""
        constrained = [
            Constrained(
                sequence_id=sequence.spec.id,
                grammar=sequence.spec.sampling.grammar,
                tokens=sequence.tokens,
                num_prompt=sequence.spec.num_prompt,
                owner=sequence.spec.sampling.grammar_owner,
            )
            for sequence in self._requests.running
            if sequence.needs_mask
        ]
        if not constrained:
            return set()
        return {each.sequence_id for each in constrained}.difference(
            self._prepare_masks(constrained)
        )

    def _next_prompt(
        self, prompts: list[Sequence], num_rows: float, events: list[Event]
    ) -> Sequence | None:
        """Removes and returns the first running prompt, or admits one from the queue.

        Admits from the queue if there is no running prompt or if the queue's head sorts before it.
        Returns None if the next prompt could sample more than `num_rows` tokens.
        """
        waiting = self._requests.waiting
        while prompts and prompts[0].state is not State.RUNNING:  # preempted meanwhile
            prompts.pop(0)
        while (
            waiting
            and (not prompts or waiting[0].spec.order < prompts[0].spec.order)
            and self._can_admit()
        ):
            sequence = waiting[0]
            if sequence.num_samples > num_rows:
                return None
            events.append(self._admit(sequence))
            if sequence.state is State.RUNNING and not sequence.needs_mask:
                return sequence
        if not prompts or prompts[0].num_samples > num_rows:
            return None
        return prompts.pop(0)

    def _admit_imports(self) -> list[Admitted]:
        """Admits the sequences at the head of the queue whose KV cache comes from elsewhere.

        They need blocks but compute nothing, so they do not wait for the end of running prompts.
        These have their blocks for the step already.
        """
        waiting = self._requests.waiting
        events: list[Admitted] = []
        while waiting and waiting[0].spec.task is Task.DECODE and self._can_admit():
            events.append(self._admit(waiting[0]))
        return events

    def _is_next_recovery(self, prompts: list[Sequence]) -> bool:
        """Returns True if the next running or waiting prompt resumes an interrupted stream."""
        return any(each.spec.is_recovery for each in (*prompts[:1], *self._requests.waiting[:1]))

    def _lease(self, sequence: Sequence) -> Suspended:
        """Leases a suspended sequence."""
        self._requests.lease(sequence)
        *tokens, last = sequence.tokens
        return Suspended(
            id=sequence.spec.id,
            tables=tuple(
                TableBlocks(tuple(table.blocks), table.first) for table in sequence.tables
            ),
            state=sequence.slots.current,
            tokens=tuple(tokens),
            first_token=last,
        )

    def _can_admit(self) -> bool:
        return self._num_admissible() > 0

    def _num_admissible(self) -> int:
        """Returns how many queued sequences could be admitted now, if all are like the first."""
        if not self._requests.waiting:
            return 0
        most = len(self._requests.waiting)
        sequence = self._requests.waiting[0]
        num_holding = self._requests.num_holding
        num_fitting = (self.budgets.max_sequences - num_holding) // sequence.num_branches
        # After a change of role, a queued request may have more branches than the new role allows
        # sequences. It runs alone.
        most = min(most, num_fitting if num_holding else max(num_fitting, 1))
        if most <= 0:
            return 0
        hit = self._requests.find_hit(sequence)
        blocks = [self.pool.block_of(name) for _, names in hit.parts for name in names]
        shared = [block for block in blocks if block is not None]
        needed = self._requests.num_admission_blocks(sequence, hit, len(shared))
        states = self._requests.states.pool
        slot = None if hit.state is None else states.block_of(hit.state)
        num_states = self._requests.states.num_admission(sequence, hit)
        if num_states:
            taken = states.num_evictable([] if slot is None else [slot])
            most = min(most, (states.num_available - taken) // num_states)
        if needed:
            most = min(most, (self.pool.num_available - self.pool.num_evictable(shared)) // needed)
        return most

    def _admit(self, sequence: Sequence) -> Admitted:
        hit = self._requests.find_hit(sequence)
        is_remote = self._plan_import(sequence, hit)
        self._requests.admit(sequence, hit)
        slots = sequence.slots
        return Admitted(
            id=sequence.spec.id,
            queue_seconds=sequence.started - sequence.submitted,
            num_cached=sequence.num_cached,
            num_loaded=sequence.num_loaded,
            import_hashes=sequence.import_hashes,
            import_tables=(
                self._requests.import_tables(sequence) if sequence.import_hashes else ()
            ),
            prefix_source="remote" if is_remote else "disk",
            tables=tuple(table.prompt for table in sequence.tables),
            state=slots.current if sequence.spec.task is Task.DECODE else slots.final,
            import_state=slots.free[0] if sequence.import_hashes and slots.free else None,
        )

    def _plan_import(self, sequence: Sequence, hit: Hit) -> bool:
        """Decides which blocks after a hit to import; returns True for those of another worker."""
        if sequence.spec.task is Task.DECODE:
            return False
        num_found = hit.num_tokens // self._config.block_size
        chain = self._requests.cacheable(sequence)[num_found:]
        count = self._count_importable(chain)
        num_remote = min(
            sequence.spec.num_remote // self._config.block_size - num_found, len(chain)
        )
        length = max(num_remote, count)
        ratio = self._requests.resume.alignment // self._config.block_size
        sequence.import_hashes = tuple(chain[: length // ratio * ratio])
        return num_remote > count

    def _grow(self, sequence: Sequence) -> list[Event]:
        """Gives a sequence blocks for one more token.

        Reports the sequences that are preempted for it. The sequence itself may be preempted if it
        is the newest. A beam search waits instead while imports hold blocks. It would start again
        from its prompt, so that two searches could preempt each other forever, each while the other
        is imported. When the import has ended, its sequence is the newest.
        """
        events: list[Event] = []
        end = sequence.num_scheduled + 1
        while sequence.state is State.RUNNING and not (
            self._requests.extend(sequence, end) >= end and self._has_slot(sequence)
        ):
            newest = self._requests.running[-1]
            if sequence.search and newest.search is sequence.search and self._requests.is_importing:
                self._stalled.add(sequence.search.spec.id)
                break
            events += map(_preempted, self._requests.abort(newest))
        return events

    def _is_stalled(self, sequence: Sequence) -> bool:
        return sequence.search is not None and sequence.search.spec.id in self._stalled

    def _extend(self, sequence: Sequence, count: int) -> int:
        """Gives a prompt blocks for its next `count` tokens; returns the number that fit.

        These are fewer only if other sequences hold blocks that have left the prompt's windows.
        """
        start = sequence.num_scheduled
        if not self._has_slot(sequence):
            return 0
        return min(self._requests.extend(sequence, start + count) - start, count)

    def _has_slot(self, sequence: Sequence) -> bool:
        """Returns True if the next step of a sequence has a slot for its state, or needs none."""
        if not self._config.num_states or sequence.slots.free:
            return True
        return self._requests.states.prepare(sequence) > 0

    def _awaits_token(self, sequence: Sequence) -> bool:
        """Returns True if a sequence skips the step to wait for its pending token.

        It waits if a draft is likely to follow, because a draft needs the id of that token.
        """
        is_pending = sequence.num_scheduled == sequence.num_tokens
        return is_pending and bool(
            self._guess(sequence, self._draft_end(sequence) - sequence.num_tokens - 1)
        )

    def _draft(
        self, decodes: Items[Sequence], prompts: Items[Sequence]
    ) -> dict[int, tuple[int, ...]]:
        """Returns drafts for `decodes` by sequence id, and gives the sequences blocks for them.

        The room is `max_step_tokens` tokens and the available blocks and slots. Running and waiting
        prompts keep a row of the step, for the end of one, and their slots. Preempts no sequence.
        """
        if self._speculative is None:
            return {}
        has_prompts = bool(prompts or self._requests.waiting)
        num_sampled = sum(sequence.num_samples for sequence in decodes)
        room = min(
            self._speculative.max_step_tokens - len(decodes),
            self._config.budgets.max_step_rows - num_sampled - has_prompts,
        )
        num_kept = self._num_prompt_states(prompts) if self._has_states else 0
        drafts: dict[int, tuple[int, ...]] = {}
        requests = []
        for sequence in decodes:
            if room <= 0 or sequence.num_scheduled == sequence.num_tokens:
                continue
            guess = self._guess(
                sequence, min(room, self._draft_end(sequence) - sequence.num_tokens)
            )
            count = self._make_room(sequence, len(guess), num_kept)
            room -= count
            if self._speculative.model is None:
                drafts[sequence.spec.id] = guess[:count]
            elif count:
                request = DraftRequest(
                    sequence_id=sequence.spec.id,
                    tokens=sequence.tokens,
                    blocks=sequence.tables[0].blocks,
                    sampling=sequence.spec.sampling,
                    count=count,
                )
                requests.append(request)
        return drafts | self._propose(requests) if requests else drafts

    def _draft_end(self, sequence: Sequence) -> int:
        """Returns the length that a sequence may have with its draft tokens."""
        longest = self._config.draft_context_tokens
        return sequence.max_length if longest is None else min(sequence.max_length, longest)

    def _num_prompt_states(self, prompts: Items[Sequence]) -> int:
        """Returns the number of slots of states that drafts leave to prompts.

        Without them, the running `prompts` would be preempted and the head of the queue would wait.
        A head that must wait for the end of another sequence needs no slots yet.
        """
        requests = self._requests
        count = sum(not prompt.slots.free for prompt in prompts)
        if not requests.waiting:
            return count
        head = requests.waiting[0]
        num_head = self.num_states(head.spec)
        num_held = NUM_STATES * requests.num_holding
        if (
            requests.num_holding + head.num_branches > self.budgets.max_sequences
            or num_held + num_head > self._config.num_states
        ):
            return count
        return count + num_head + 1  # one for a cached state from which the head continues

    def _make_room(self, sequence: Sequence, count: int, num_kept: int) -> int:
        """Gives a sequence blocks for up to `count` draft tokens; returns the number that fit.

        Leaves `num_kept` slots of states to other sequences.
        """
        start = sequence.num_tokens
        if self._config.num_states:
            num_slots = self._requests.states.prepare(sequence, count + 1, num_kept)
            count = min(count, num_slots - 1)
        return min(self._requests.extend(sequence, start + count) - start, count)

    def _guess(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        """Returns an n-gram draft of at most `room` tokens.

        With a draft model, returns placeholders (PENDING_TOKEN) for the tokens that it will draft.
        """
        if self._speculative is None or not sequence.may_draft:
            return ()
        sequence.drafter = sequence.drafter or Drafter(self._speculative)
        if self._speculative.model is not None:
            return (PENDING_TOKEN,) * sequence.drafter.count(sequence.num_tokens, room)
        return sequence.drafter.draft(sequence.tokens, room)

    def _step(
        self,
        sequence: Sequence,
        count: int,
        copies: list[tuple[int, int]],
        draft: tuple[int, ...] = (),
    ) -> SequenceStep:
        """Schedules a sequence's next `count` tokens and the `draft` after them.

        Adds to `copies` the block copy that the sequence needs before the step, if any.
        """
        start = sequence.num_scheduled
        end = start + count
        num_samples = sequence.num_samples if end >= len(sequence.tokens) else 0
        step = SequenceStep(
            sequence_id=sequence.spec.id,
            token_ids=(tuple(sequence.tokens[start:end]) or (PENDING_TOKEN,)) + draft,
            start=start,
            new_blocks=take_new_blocks(sequence, copies) if sequence.has_new_blocks else (),
            sampling=None if sequence.sampling_sent else sequence.spec.sampling,
            adapter=0 if sequence.sampling_sent else sequence.spec.adapter,
            num_samples=num_samples + len(draft),
            num_draft=len(draft),
        )
        if step.sampling is not None and step.sampling.needs_history:
            step = replace(
                step, history=tuple(sequence.tokens), num_prompt=sequence.spec.num_prompt
            )
        if self._has_states:
            state = self._requests.states.plan(sequence, count, len(draft))
            step = replace(step, state=state)
        if sequence.scores_prompt and end < sequence.spec.num_prompt:
            step = replace(step, next_prompt_token=sequence.tokens[end])
        sequence.num_scheduled = end + len(draft)
        sequence.num_draft = len(draft)
        sequence.sampling_sent = True
        return step


def _preempted(sequence_id: int) -> Preempted:
    return Preempted(id=sequence_id)
