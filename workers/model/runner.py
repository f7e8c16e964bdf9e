"""Executes step plans on one device: builds the flat batch, runs the model and samples.

One file because the methods of a step share the runner's state per sequence: block tables,
adapters, drafts, sampled rows.
"""

import itertools
import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..engine.plan import (
    PENDING_TOKEN,
    Constrained,
    Executor,
    OnLayers,
    Samples,
    SequenceStep,
    StepPlan,
)
from . import kernels
from .adapter import AdapterTable
from .attention.backend import AttentionBackend, SequenceSpan, StepAttention
from .attention.torch_backend import TorchAttentionBackend
from .checkpoint import Checkpoint
from .config import ModelConfig
from .device import DTYPES, copy_to_device
from .kv.states import StateStore
from .kv.store import HostBlocks, PagedKv
from .layers.rows import EmbeddingRows, SequenceRows
from .loader import LoadedModel, load_model
from .models.family import CausalLM
from .parallel import Group, TensorParallel
from .pooling import Pooler, StepOutput, collect
from .programs import AdaptedPrograms, Programs, StepProgram, record_steps
from .sampling.finite import sum_chunks
from .sampling.grammar_cache import GrammarCache
from .sampling.logprobs import compute_prompt_logprobs
from .sampling.sampler import Sampler
from .states.steps import StateStep, StateSteps, StepStates
from .warmup import StepLimits, largest_steps, typical_steps

if TYPE_CHECKING:
    from .graphs import Capture, DecodeGraphs

logger = logging.getLogger(__name__)


class ModelRunner(Executor):
    """Implements `Executor` for one rank.

    Used from one thread; `kv` may be read and written from any thread. On a GPU, `launch` does not
    wait: all work is queued, and sampled tokens are inserted into the next step on the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        model: CausalLM,
        kv: PagedKv,
        *,
        on_stage: Callable[[str], None] | None = None,
        folder: Path | None = None,
        group: Group | None = None,
        batch_invariant: bool = False,
        adapters: AdapterTable | None = None,
        host: HostBlocks | None = None,
        host_states: StateStore | None = None,
    ) -> None:
        """Takes this rank's loaded `model` and the `config` of the whole model.

        `on_stage` is called with "model" and "sample" when a step reaches that stage, for
        benchmarks. Without the model's `folder` there are no grammars.
        """
        self.config = config
        self.kv = kv
        self.adapters = adapters or AdapterTable()
        self._model = model
        self._on_stage = on_stage or (lambda stage: None)
        self._device = kv.device
        self._host = host
        self._host_states = host_states
        # None: the model keeps no state. The table of the steps has a fixed address, which recorded
        # programs know.
        self._states = (
            None if kv.states is None else StepStates(steps=StateSteps(), memory=kv.states.memory)
        )
        self._group = group
        tp = TensorParallel(group)
        self._attention = _attention_backend(kv, config, tp, batch_invariant)
        self._graphs: DecodeGraphs | None = None
        self._decode_program = None
        self._token_program = None
        self._adapted_programs: AdaptedPrograms | None = None
        if group is None and isinstance(self._attention, TorchAttentionBackend):
            record = partial(record_steps, model, self._attention, self._states)
            self._decode_program, self._token_program = record()
            if model.lora is not None:
                self._adapted_programs = AdaptedPrograms(model.lora, record)
        # The block tables of each sequence, as in `SequenceSpan`.
        self._tables: dict[int, tuple[array[int], ...]] = {}
        self._grammars = GrammarCache(folder, config.vocab_size, config.eos_token_ids)
        # If a step starts before the last step's tokens are on the host, ranks receive rank 0's
        # tokens on the device: their own may differ at near ties. Otherwise the next plan has rank
        # 0's tokens.
        self._sampler = Sampler(
            config.vocab_size,
            config.eos_token_ids,
            self._grammars if tp.rank == 0 else None,
            self._device,
            broadcast=group.broadcast if group and self.launches_ahead else None,
        )
        self._pooler = Pooler(model.normalize)
        self.rows = SequenceRows(self._device)  # in place of embeddings
        # Requested number of alternatives for each prompt token, by sequence.
        self._num_top: dict[int, int] = {}
        # Tokens that the last step sampled, and their rows by sequence.
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._last_rows: dict[int, int] = {}

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        cache_dtype: str = "auto",
        device: str,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_states: int = 0,
        shared: bool = False,
        group: Group | None = None,
        batch_invariant: bool = False,
    ) -> "ModelRunner":
        """Loads a checked model folder and allocates its KV cache: `load_model`, then `over`."""
        loaded = load_model(
            checkpoint, dtype=dtype, device=device, group=group, batch_invariant=batch_invariant
        )
        return cls.over(
            loaded,
            cache_dtype=cache_dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            num_states=num_states,
            shared=shared,
        )

    @classmethod
    def over(
        cls,
        loaded: LoadedModel,
        *,
        cache_dtype: str = "auto",
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_states: int = 0,
        num_host_states: int = 0,
        shared: bool = False,
    ) -> "ModelRunner":
        """Returns a runner of a loaded model, with a KV cache of its own.

        `cache_dtype` as in `KvLayout`, `num_states` and `shared` as in `PagedKv`. `num_host_blocks`
        and `num_host_states` are in host memory, for blocks and states that leave the cache. Raises
        ValueError if host memory is insufficient.
        """
        tp = TensorParallel(loaded.group)
        layout = loaded.checkpoint.kv_layout(loaded.dtype, cache_dtype)
        kv = PagedKv(
            layout,
            num_blocks=num_blocks,
            block_size=block_size,
            device=loaded.device,
            shared=shared,
            tp=tp.size,
            rank=tp.rank,
            num_states=num_states,
        )
        host_states = None
        if num_host_states:
            host_states = StateStore(
                layout, num_slots=num_host_states, tp=tp.size, rank=tp.rank, setting="kv_host_gb"
            )
        adapters = AdapterTable(
            loaded.model.lora,
            dtype=DTYPES[loaded.dtype],
            device=loaded.device,
            batch_invariant=loaded.batch_invariant,
        )
        return cls(
            loaded.checkpoint.config,
            loaded.model,
            kv,
            folder=loaded.checkpoint.folder,
            group=loaded.group,
            batch_invariant=loaded.batch_invariant,
            adapters=adapters,
            host=HostBlocks(kv, num_host_blocks) if num_host_blocks else None,
            host_states=host_states,
        )

    @property
    def scratch_bytes_per_block(self) -> int:
        """Returns the bytes of device memory that steps need for each block of the KV cache."""
        return self._attention.scratch_bytes_per_block

    @property
    def launches_ahead(self) -> bool:
        """Returns True if `launch` returns before the step has finished."""
        return self._device.type == "cuda"

    def load_grammar(self, grammar: str, owner: bytes = b"", tenant: bytes = b"") -> object:
        """Compiles a grammar of `SamplingParams`.

        Sequences of the same owner reuse it as long as the result is held. May be called from any
        thread; may take seconds. Raises as `GrammarCache.load`.
        """
        return self._grammars.load(grammar, owner, tenant)

    def prepare_masks(self, sequences: Sequence[Constrained], seconds: float) -> Collection[int]:
        return self._sampler.prepare_masks(sequences, seconds)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """Implements `Executor.launch`.

        Raises KeyError if a sequence's first step has no sampling parameters.
        """
        for sequence_id in plan.dropped:
            self._release(sequence_id)
        for adapter in plan.unloaded:
            self.adapters.unload(adapter)
        for step in plan.sequences:
            self._admit(step)
        with self._ordered(plan):
            return self._launch(plan, None if self.launches_ahead else on_layers)

    def warmup(self, limits: StepLimits = StepLimits()) -> None:
        """Runs typical steps, so that the first request does not pay for one-time initialization.

        On a GPU also runs the largest steps within `limits`, and captures graphs. Overwrites the KV
        cache: call it before the first plan.
        """
        self.run_largest_steps(limits)
        self.capture_decodes(limits.num_rows)

    def run_largest_steps(self, limits: StepLimits) -> None:
        """Runs typical steps, and on a GPU the largest ones within `limits` and the KV cache.

        Kernels are compiled there, and libraries and the allocator take memory, by the size of the
        step.
        """
        size = self.kv.block_size
        capacity = self.kv.num_blocks * size
        # Positions beyond the context may have no embedding, and a GPU ends the process for them.
        context = self.config.context_tokens
        if not self.launches_ahead:
            num_tokens = min(size, 16, capacity, context)
            with_state = self._states is not None
            for plan in typical_steps(
                num_tokens, self.kv.tables, with_filters=False, with_state=with_state
            ):
                self.execute(plan)
            return
        limits = replace(limits, num_tokens=min(limits.num_tokens, capacity))
        longest = min(limits.num_tokens, context)
        for plan in typical_steps(longest, self.kv.tables, with_filters=True):
            self.execute(plan)
        for plan in largest_steps(limits, context, self.kv.tables):
            self.execute(plan)

    def capture_decodes(self, max_sequences: int) -> None:
        """Captures graphs of decode steps, on a GPU; if that fails, logs why and goes on without.

        Call it before the first plan.
        """
        waits = any(module.waits_for_device for module in self._model.modules())
        if self.launches_ahead and not waits and kernels.on_gpu(self.kv.memory):
            from .graphs import cuda_capture, graph_batches

            try:
                self.capture_graphs(cuda_capture(), graph_batches(max_sequences))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                # The code of transformers and of plugins may wait for the device or copy from
                # pageable memory, which a capture forbids. All ranks run the same code, so they
                # fail alike.
                reason = str(error).partition("\n")[0]
                logger.warning("CUDA graphs are off and steps run eagerly: %s", reason)

    @torch.inference_mode()
    def capture_graphs(self, capture: "Capture", batches: Sequence[int]) -> None:
        """Captures graphs for decode steps of up to the largest of `batches` sequences.

        Requires `TritonAttentionBackend`; call it before the first plan.
        """
        # These import Triton, which is not always installed and takes a second.
        from .attention.triton_backend import TritonAttentionBackend
        from .graphs import DecodeGraphs

        assert isinstance(self._attention, TritonAttentionBackend)

        def forward(
            token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
        ) -> torch.Tensor:
            return self._model.compute_logits(self._model(token_ids, positions, attention))

        self._graphs = DecodeGraphs(forward, self._attention, capture, batches)

    def _ordered(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Orders a step against the transfers of its blocks, which a GPU runs beside steps."""
        if self.kv.order is None:
            return nullcontext()
        read: list[array[int]] = []
        written: list[array[int]] = []
        for step in plan.sequences:
            end = step.start + len(step.token_ids)
            for spec, table in zip(self.kv.tables, self._tables[step.sequence_id], strict=True):
                size = spec.block_size
                # The blocks before may belong to other sequences.
                first = 0 if spec.window is None else max(step.start + 1 - spec.window, 0) // size
                read.append(table[first : -(-end // size)])
                written.append(table[step.start // size : -(-end // size)])
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            read.append(array("i", sources))
            written.append(array("i", targets))
        return self.kv.order.step(_joined(read), _joined(written))

    def _launch(self, plan: StepPlan, on_layers: OnLayers | None) -> Callable[[], Samples]:
        """Copies the plan's blocks and states, and computes its sequences, which are admitted."""
        is_copying = self._copy_to_and_from_host(plan)
        # A step that computes waits for all ranks in any case.
        if is_copying and not plan.sequences and self._group:
            self._group.all_reduce(torch.zeros(1, device=self._device))
        if plan.copies:
            self.kv.copy(plan.copies)
        sampled = [
            each for step in plan.sequences if step.num_samples for each in step.each_sample()
        ]
        found = StepOutput()
        if plan.sequences:
            with self.adapters.applied(plan) as is_adapted:
                found = self._logits(plan, on_layers, is_adapted)
        if found.logits is None or not sampled:
            # Samples no token, but the result must still wait for the end of the step.
            return collect(plan, self._last_tokens[:0], found, None, {})
        self._on_stage("sample")
        result = self._sampler(found.logits, sampled)
        self._last_tokens = result.tokens
        self._last_rows = result.rows
        return collect(plan, result.tokens, found, result.logprobs, result.failed)

    def _copy_to_and_from_host(self, plan: StepPlan) -> bool:
        """Makes a plan's copies of blocks and states; returns True if there are any."""
        if self._host is not None and (plan.saved or plan.loaded):
            self._host.save(plan.saved)
            self._host.load(plan.loaded)
        if self._host_states is not None and (plan.saved_states or plan.loaded_states):
            assert self.kv.states is not None
            self._host_states.copy(plan.saved_states, self.kv.states)
            self.kv.states.copy(plan.loaded_states, self._host_states)
        return bool(plan.saved or plan.loaded or plan.saved_states or plan.loaded_states)

    def num_graph_replays(self) -> int:
        """Returns the number of steps that ran as a CUDA graph."""
        return self._graphs.num_replays if self._graphs else 0

    def _release(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)
        self._num_top.pop(sequence_id, None)
        self._pooler.release(sequence_id)
        self.rows.release(sequence_id)
        self._sampler.release(sequence_id)
        self.adapters.release(sequence_id)

    def _admit(self, step: SequenceStep) -> None:
        if step.sampling is not None:
            self._num_top.pop(step.sequence_id, None)
            self._tables[step.sequence_id] = tuple(array("i") for _ in self.kv.tables)
            if step.sampling.prompt_logprobs is not None:
                self._num_top[step.sequence_id] = step.sampling.prompt_logprobs
            self._pooler.admit(step.sequence_id, step.sampling.pooling)
            self._sampler.admit(step, step.sampling)
            self.adapters.admit(step.sequence_id, step.adapter)
        for table, new in zip(self._tables[step.sequence_id], step.new_blocks, strict=False):
            # Indices without a block are before the window of the sequence's tokens.
            table.extend([0] * (new.first - len(table)))
            table[new.first :] = array("i", new.blocks)

    def _logits(self, plan: StepPlan, on_layers: OnLayers | None, is_adapted: bool) -> StepOutput:
        """Runs the model; each draft token also has a row of logits.

        A step whose embeddings are partly replaced uses neither a step program nor a CUDA graph. A
        step that `is_adapted` uses no CUDA graph.
        """
        spans = [
            SequenceSpan(
                tables=self._tables[step.sequence_id],
                start=step.start,
                num_tokens=len(step.token_ids),
            )
            for step in plan.sequences
        ]
        if self._states is not None:
            self._states.steps.fill(_state_steps(plan.sequences))
        token_ids = self._token_ids(plan)
        num_sampling = sum(step.num_samples > 0 for step in plan.sequences)
        pools = self._pooler.takes_part(plan.sequences)
        replaced = self.rows.of_step(
            (step.sequence_id, step.start, len(step.token_ids)) for step in plan.sequences
        )
        decode_program, token_program = (
            self._programs(is_adapted) if replaced is None else (None, None)
        )
        only_decodes = (
            len(spans) == len(token_ids) == num_sampling and replaced is None and not pools
        )
        if self._graphs and only_decodes and not is_adapted:
            self._on_stage("model")
            logits = self._graphs.run(token_ids, spans)
            if logits is not None:
                return StepOutput(logits)
        positions, sampled_rows = self._positions_and_rows(plan, spans)
        if decode_program and only_decodes:
            self._on_stage("model")
            logits = decode_program(token_ids, positions, spans)
            if logits is not None:
                return StepOutput(logits)
        hidden = self._hidden(
            token_ids, positions, spans, on_layers, replaced, program=token_program
        )
        prompts = None
        if self._num_top and any(each.sequence_id in self._num_top for each in plan.sequences):
            prompts = compute_prompt_logprobs(
                hidden, self._model.compute_logits, plan.sequences, self._num_top
            )
        samples_all = len(sampled_rows) == len(token_ids)
        logits = self._model.compute_logits(hidden if samples_all else hidden[sampled_rows])
        embeddings = self._pooler(hidden, plan.sequences) if pools else None
        return StepOutput(logits, prompts, sum_chunks(hidden, plan.sequences), embeddings)

    def _positions_and_rows(
        self, plan: StepPlan, spans: Sequence[SequenceSpan]
    ) -> list[torch.Tensor]:
        """Returns the positions [num_tokens] and the sampled rows [num_sampled], on the device."""
        counts = np.array([span.num_tokens for span in spans])
        ends = counts.cumsum()
        firsts = np.array([span.start for span in spans]) - ends + counts
        positions = np.arange(ends[-1]) + firsts.repeat(counts)
        return copy_to_device([positions, _sampled_rows(plan.sequences, ends)], self._device)

    def _programs(self, is_adapted: bool) -> Programs:
        """Returns the programs of the step, whose adapters are applied."""
        if not is_adapted:
            return self._decode_program, self._token_program
        shape = self._model.lora.shape if self._model.lora else None
        if shape is None or self._adapted_programs is None or self._decode_program is None:
            return None, None
        return self._adapted_programs.of_step(shape)

    def _hidden(
        self,
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # the same
        spans: Sequence[SequenceSpan],
        on_layers: OnLayers | None,
        rows: EmbeddingRows | None,
        *,
        program: StepProgram | None,
    ) -> torch.Tensor:
        """Returns the hidden states after the last layer, [num_tokens, hidden].

        Without a `program`, or if the step is too large for it, computes call by call.
        """
        if program:
            self._on_stage("model")
            hidden = program(token_ids, positions, spans, on_layers)
            if hidden is not None:
                return hidden
        attention = self._attention.plan(spans)
        self._on_stage("model")
        return self._model(token_ids, positions, attention, on_layers, rows, self._states)

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        """Returns the step's tokens on the device, [num_tokens].

        Tokens that the last step sampled are not copied to the host for this.
        """
        known = np.fromiter(
            itertools.chain.from_iterable(step.token_ids for step in plan.sequences), np.int32
        )
        if PENDING_TOKEN not in known:
            return copy_to_device([known], self._device)[0]
        index = np.arange(len(known)) + len(self._last_tokens)
        pending = [
            step.sequence_id for step in plan.sequences if step.token_ids[0] == PENDING_TOKEN
        ]
        index[known == PENDING_TOKEN] = [self._last_rows[sequence_id] for sequence_id in pending]
        known_device, index_device = copy_to_device([known, index], self._device)
        # A sequence whose last logits were not finite may be in this step: any token will do.
        return torch.cat((self._last_tokens.clamp(min=0), known_device)).index_select(
            0, index_device
        )


def _joined(tables: "Sequence[array[int]]") -> "np.ndarray[Any, np.dtype[np.int32]]":
    # By way of bytes, because an array cannot grow while numpy uses its memory.
    return np.frombuffer(b"".join(table.tobytes() for table in tables), np.int32)


def _sampled_rows(
    steps: Sequence[SequenceStep], ends: "np.ndarray[Any, Any]"
) -> "np.ndarray[Any, Any]":
    """Returns the rows of the flat batch whose logits are sampled.

    `ends` has the end of each step in the batch.
    """
    rows: np.ndarray[Any, Any] = ends[[step.num_samples > 0 for step in steps]] - 1
    drafts = [step.num_draft for step in steps if step.num_samples]
    if not any(drafts):
        return rows
    return np.concatenate(
        [np.arange(row - count, row + 1) for row, count in zip(rows, drafts, strict=True)]
    )


def _state_steps(steps: Sequence[SequenceStep]) -> list[StateStep]:
    """Returns where the sequences of a step read and write their states."""
    found: list[StateStep] = []
    first_row = 0
    for step in steps:
        assert step.state is not None
        found.append(
            StateStep(
                first_row=first_row,
                num_tokens=len(step.token_ids),
                source=step.state.source,
                targets=step.state.targets,
            )
        )
        first_row += len(step.token_ids)
    return found


def _attention_backend(
    kv: PagedKv, config: ModelConfig, tp: TensorParallel, batch_invariant: bool
) -> AttentionBackend:
    layers = [tp.local_geometry(layer) for layer in config.layers]
    if kernels.on_gpu(kv.memory):
        from .attention.triton_backend import TritonAttentionBackend  # imports Triton

        return TritonAttentionBackend(kv, layers, batch_invariant=batch_invariant)
    return TorchAttentionBackend(kv, layers)
