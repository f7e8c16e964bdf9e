"""Carries out step plans on one device: keeps the block tables, builds the flat batch, runs the decoder, samples."""

import itertools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..engine.plan import PENDING_TOKEN, Executor, OnLayers, Samples, SamplingParams, SequenceStep, StepPlan
from . import kernels
from .attention.torch_attention import AttentionBackend, SequenceSpan, StepAttention, TorchAttention
from .checkpoint import check_checkpoint, fingerprint
from .config import ModelConfig
from .decoder import Decoder, StepBatch
from .device import ship, to_host
from .kv_store import PagedKv, kv_bytes_per_block, kv_layout
from .layers.rotary import RotaryTable
from .parallel import Group, Shard
from .sampling.grammar import Grammars
from .sampling.logprobs import Measured, following, measure_prompts
from .sampling.sampler import Sampler
from .weights import DTYPES, Weights

if TYPE_CHECKING:
    from .graphs import Capture, DecodeGraphs

__all__ = ["ModelRunner", "kv_bytes_per_block"]


class ModelRunner(Executor):
    """Implements `Executor` for one rank. Used from one thread; `kv` may be read and written from any.

    On a GPU `launch` waits for nothing: all it does is queued, and tokens that one step samples are put into the next
    on the device."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        kv: PagedKv,
        on_stage: Callable[[str], None] | None = None,
        folder: Path | None = None,
        leads: bool = True,
    ) -> None:
        """`on_stage` hears when a step comes to "model" and to "sample"; benchmarks listen there. `folder` is the
        model's, without which there are no grammars. `leads`: what this rank draws is what counts, of a group."""
        self.config = config
        self.kv = kv
        self._decoder = decoder
        self._on_stage = on_stage or (lambda stage: None)
        self._device = kv.data.device
        self._rotary = RotaryTable(config.rope, config.head_dim, dtype=kv.data.dtype, device=self._device)
        self._attention = _attention(kv, config)
        self._graphs: DecodeGraphs | None = None
        self._tables: dict[int, array[int]] = {}  # the block tables, by sequence
        self._grammars = Grammars(folder, config.vocab_size, config.eos_token_ids)
        followed = self._grammars if leads else None
        self._sampler = Sampler(config.vocab_size, config.eos_token_ids, followed, self._device)
        self._num_top: dict[int, int] = {}  # alternatives of each prompt token, where they are wanted, by sequence
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=self._device)  # what the last step drew,
        self._last_draws: dict[int, int] = {}  # and where, by sequence

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: str,
        device: str,
        num_blocks: int,
        block_size: int,
        shared: bool = False,
        group: Group | None = None,
    ) -> "ModelRunner":
        """Loads a model folder. `dtype` is float32, bfloat16 or float16; `device` is what torch.device takes; `shared`
        as in `PagedKv`; of a group's model only the own part is read.

        Raises CheckpointError if the folder does not hold a model that can be served."""
        config = check_checkpoint(folder)
        shard = Shard(config, group)
        place = torch.device(device)
        decoder = Decoder(config, Weights(folder, dtype=DTYPES[dtype], device=place), shard)
        layout = kv_layout(config, dtype, fingerprint(folder))
        tp, rank = (group.size, group.rank) if group else (1, 0)
        kv = PagedKv(
            layout, num_blocks=num_blocks, block_size=block_size, device=place, shared=shared, tp=tp, rank=rank
        )
        return cls(shard.config, decoder, kv, folder=folder, leads=rank == 0)

    @property
    def launches_ahead(self) -> bool:
        """Whether `launch` returns before the step has run."""
        return self.kv.data.is_cuda

    def load_grammar(self, grammar: str) -> object:
        """Compiles a grammar of `SamplingParams`, which sequences find compiled as long as somebody holds the result.
        Raises ValueError if it cannot be followed. From any thread; may take seconds."""
        return self._grammars.load(grammar)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, on_layers: OnLayers | None = None) -> Callable[[], Samples]:
        """See `Executor.launch`. Raises KeyError if a sequence's first step carries no sampling parameters."""
        for sequence_id in plan.dropped:
            self._release(sequence_id)
        if plan.copies:
            self.kv.copy(plan.copies)
        for step in plan.sequences:
            self._admit(step)
        sampled = [step for step in plan.sequences if step.num_samples]
        on_layers = None if self.launches_ahead else on_layers
        logits, prompts = self._logits(plan, on_layers) if plan.sequences else (None, None)
        if logits is None or not sampled:
            return _collect(
                self._last_tokens[:0], None, prompts, {}
            )  # no token, but its end is to be waited for all the same
        self._on_stage("sample")
        drawn = self._sampler(logits, sampled)
        self._last_tokens = drawn.tokens
        self._last_draws = drawn.places
        return _collect(drawn.tokens, drawn.logprobs, prompts, drawn.failed)

    def warmup(self) -> None:
        """Runs small steps, so that the first request does not pay for first-use set-up, and captures graphs on a GPU.

        Overwrites the KV cache of block 0: call it before the first plan."""
        block = self.kv.block_size
        for num_tokens, temperature in ((min(block, 16), 0.0), (1, 1.0)):
            step = SequenceStep(
                sequence_id=-1,
                token_ids=(0,) * num_tokens,
                start=0,
                new_blocks=(0,),
                sampling=SamplingParams(temperature=temperature),
                num_samples=1,
            )
            self.execute(StepPlan(sequences=(step,), dropped=()))
        self.execute(StepPlan(sequences=(), dropped=(-1,)))
        if self.kv.device.type == "cuda" and not self._attention.reads_whole_blocks:
            from .graphs import BATCHES, CudaCapture

            self.capture_graphs(CudaCapture(), BATCHES)

    @torch.inference_mode()
    def capture_graphs(self, capture: "Capture", batches: Sequence[int]) -> None:
        """From now on decode steps of up to the largest of `batches` sequences are replayed. Only with `GpuAttention`;
        call it before the first plan."""
        from .attention.gpu_attention import GpuAttention
        from .graphs import DecodeGraphs  # with Triton, which is not everywhere and takes a second

        assert isinstance(self._attention, GpuAttention)
        self._graphs = DecodeGraphs(self._forward, self._attention, capture, batches)

    def _release(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)
        self._num_top.pop(sequence_id, None)
        self._sampler.release(sequence_id)

    def _admit(self, step: SequenceStep) -> None:
        if step.sampling is not None:
            self._introduce(step, step.sampling)
        blocks = self._tables[step.sequence_id]
        blocks.extend(step.new_blocks)
        # A mask hides any number but no NaN or infinity that the block's last owner may have left, so where attention
        # masks what it has read, the rest of a block is cleared when the sequence enters it.
        last = (step.start + len(step.token_ids) - 1) // self.kv.block_size
        first_in_last = max(step.start - last * self.kv.block_size, 0)
        if self._attention.reads_whole_blocks and (step.sampling is not None or first_in_last == 0):
            self.kv.clear_after(blocks[last], first_in_last)

    def _introduce(self, step: SequenceStep, params: SamplingParams) -> None:
        self._release(step.sequence_id)
        self._tables[step.sequence_id] = array("i")
        if params.prompt_logprobs is not None:
            self._num_top[step.sequence_id] = params.prompt_logprobs
        self._sampler.admit(step, params)

    def _logits(self, plan: StepPlan, on_layers: OnLayers | None) -> tuple[torch.Tensor, Measured | None]:
        """[num_sampled, vocab_size], and what is wanted of prompts."""
        spans = [
            SequenceSpan(blocks=self._tables[step.sequence_id], start=step.start, num_tokens=len(step.token_ids))
            for step in plan.sequences
        ]
        token_ids = self._token_ids(plan)
        num_sampled = sum(step.num_samples > 0 for step in plan.sequences)
        if self._graphs and len(spans) == len(token_ids) == num_sampled:
            self._on_stage("model")
            logits = self._graphs.run(token_ids, spans)
            if logits is not None:
                return logits, None
        counts = np.array([span.num_tokens for span in spans])
        ends = counts.cumsum()
        firsts = np.array([span.start for span in spans]) - ends + counts
        positions = np.arange(ends[-1]) + firsts.repeat(counts)
        sampled_rows = ends[[step.num_samples > 0 for step in plan.sequences]] - 1
        positions_there, rows_there = ship([positions, sampled_rows], self._device)
        attention = self._attention.plan(spans)
        self._on_stage("model")
        rows = None if num_sampled == len(token_ids) else rows_there
        if not self._num_top or not any(
            step.sequence_id in self._num_top and following(step) for step in plan.sequences
        ):
            return self._forward(token_ids, positions_there, attention, rows, on_layers), None
        hidden = self._decoder.hidden(self._batch(token_ids, positions_there, attention, rows), on_layers)
        prompts = measure_prompts(hidden, self._decoder.logits, plan.sequences, self._num_top)
        return self._decoder.logits(hidden if rows is None else hidden[rows]), prompts

    def _token_ids(self, plan: StepPlan) -> torch.Tensor:
        """The step's tokens on the device, [num_tokens]; those that the step before samples never leave it."""
        known = np.fromiter(itertools.chain.from_iterable(step.token_ids for step in plan.sequences), np.int32)
        if PENDING_TOKEN not in known:
            return ship([known], self._device)[0]
        index = np.arange(len(known)) + len(self._last_tokens)
        places = np.flatnonzero(known == PENDING_TOKEN)
        pending = [step.sequence_id for step in plan.sequences if step.token_ids[0] == PENDING_TOKEN]
        index[places] = [self._last_draws[sequence_id] for sequence_id in pending]
        known_there, index_there = ship([known, index], self._device)
        return torch.cat((self._last_tokens, known_there)).index_select(0, index_there)

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        sampled_rows: torch.Tensor | None,
        on_layers: OnLayers | None = None,
    ) -> torch.Tensor:
        """Implements `graphs.Forward`."""
        return self._decoder(self._batch(token_ids, positions, attention, sampled_rows), on_layers)

    def _batch(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        sampled_rows: torch.Tensor | None,
    ) -> StepBatch:
        cos, sin = self._rotary(positions)
        return StepBatch(token_ids=token_ids, cos=cos, sin=sin, attention=attention, sampled_rows=sampled_rows)


def _collect(
    tokens: torch.Tensor, logprobs: Measured | None, prompts: Measured | None, failed: dict[int, str]
) -> Callable[[], Samples]:
    """tokens [num_draws]"""
    measured = [each for each in (logprobs, prompts) if each is not None]
    wait = to_host(tokens, *(tensor for each in measured for tensor in each.tensors))
    if not measured:
        return lambda: Samples(tokens=wait()[0], failed=failed)

    def collect() -> Samples:
        drawn, *rest = wait()
        read = iter(each.read(*rest[3 * place : 3 * place + 3]) for place, each in enumerate(measured))
        return Samples(
            tokens=drawn,
            logprobs=next(read) if logprobs is not None else {},
            prompt_logprobs=next(read) if prompts is not None else {},
            failed=failed,
        )

    return collect


def _attention(kv: PagedKv, config: ModelConfig) -> AttentionBackend:
    if kernels.on_gpu(kv.data):
        from .attention.gpu_attention import GpuAttention  # with Triton

        return GpuAttention(kv, config.windows, config.num_heads)
    return TorchAttention(kv, config.windows, config.num_heads)
