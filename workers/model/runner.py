"""Carries out step plans on one device: keeps the block tables, builds the flat batch, runs the decoder, samples."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..engine.plan import SamplingParams, SequenceStep, StepPlan
from .attention import SequenceSpan, TorchAttention
from .checkpoint import check_checkpoint, fingerprint
from .config import ModelConfig
from .decoder import Decoder, StepBatch
from .kv import PagedKv, kv_bytes_per_block, kv_layout
from .rope import RotaryTable
from .sampler import sample
from .weights import DTYPES, Weights

__all__ = ["ModelRunner", "kv_bytes_per_block"]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """What a rank remembers of a sequence between steps."""

    blocks: list[int]
    sampling: SamplingParams


class ModelRunner:
    """Implements `Executor` for one rank. Used from one thread; `kv` may be read and written from any."""

    def __init__(self, config: ModelConfig, decoder: Decoder, kv: PagedKv) -> None:
        self.config = config
        self.kv = kv
        self._decoder = decoder
        self._device = kv.data.device
        self._attention = TorchAttention(kv, config.windows, config.num_heads)
        self._rotary = RotaryTable(config.rope, config.head_dim, dtype=kv.data.dtype, device=self._device)
        self._sequences: dict[int, _Sequence] = {}

    @classmethod
    def load(cls, folder: Path, *, dtype: str, device: str, num_blocks: int, block_size: int) -> "ModelRunner":
        """Loads a model folder. `dtype` is float32, bfloat16 or float16; `device` is what torch.device takes.

        Raises CheckpointError if the folder does not hold a model that can be served."""
        config = check_checkpoint(folder)
        place = torch.device(device)
        decoder = Decoder(config, Weights(folder, dtype=DTYPES[dtype], device=place))
        layout = kv_layout(config, dtype, fingerprint(folder))
        return cls(config, decoder, PagedKv(layout, num_blocks=num_blocks, block_size=block_size, device=place))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[int]:
        """See `Executor.execute`. Raises KeyError if a sequence's first step carries no sampling parameters."""
        for sequence_id in plan.dropped:
            self._sequences.pop(sequence_id, None)
        for step in plan.sequences:
            self._admit(step)
        if not plan.sequences:
            return []
        logits = self._decoder(self._batch(plan))  # [num_sampled, vocab_size]
        sampled = [step for step in plan.sequences if step.sample]
        if not sampled:
            return []
        params = [self._sequences[step.sequence_id].sampling for step in sampled]
        positions = [step.start + len(step.token_ids) for step in sampled]
        tokens: list[int] = sample(logits, params, positions).tolist()
        return tokens

    def warmup(self) -> None:
        """Runs small steps, so that the first request does not pay for first-use set-up.

        Overwrites the KV cache of block 0: call it before the first plan."""
        block = self.kv.block_size
        for num_tokens, temperature in ((min(block, 16), 0.0), (1, 1.0)):
            step = SequenceStep(
                sequence_id=-1,
                token_ids=(0,) * num_tokens,
                start=0,
                new_blocks=(0,),
                sampling=SamplingParams(temperature=temperature),
                sample=True,
            )
            self.execute(StepPlan(sequences=(step,), dropped=()))
        self.execute(StepPlan(sequences=(), dropped=(-1,)))

    def _admit(self, step: SequenceStep) -> None:
        if step.sampling is not None:
            self._sequences[step.sequence_id] = _Sequence(blocks=[], sampling=step.sampling)
        blocks = self._sequences[step.sequence_id].blocks
        blocks.extend(step.new_blocks)
        # Attention reads whole blocks and masks what lies past the end. A mask hides any number but no NaN or infinity
        # that the block's last owner may have left, so the rest of a block is cleared when the sequence enters it.
        last = (step.start + len(step.token_ids) - 1) // self.kv.block_size
        first_in_last = max(step.start - last * self.kv.block_size, 0)
        if step.sampling is not None or first_in_last == 0:
            self.kv.data[:, :, blocks[last], :, first_in_last:] = 0

    def _batch(self, plan: StepPlan) -> StepBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        sampled_rows: list[int] = []
        spans: list[SequenceSpan] = []
        for step in plan.sequences:
            num_tokens = len(step.token_ids)
            token_ids += step.token_ids
            positions += range(step.start, step.start + num_tokens)
            blocks = self._sequences[step.sequence_id].blocks
            spans.append(SequenceSpan(blocks=blocks, start=step.start, num_tokens=num_tokens))
            if step.sample:
                sampled_rows.append(len(token_ids) - 1)
        cos, sin = self._rotary(torch.tensor(positions, device=self._device))
        return StepBatch(
            token_ids=torch.tensor(token_ids, device=self._device),
            cos=cos,
            sin=sin,
            attention=self._attention.plan(spans),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=self._device),
        )
