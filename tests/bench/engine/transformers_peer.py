"""Measures transformers' continuous batching, the peer on devices where no other server runs.

Its continuous batching supports no models that keep states; for these its `generate` is measured.
"""

import random
import statistics
import time
from itertools import pairwise
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from tandem.workers.model.loader import ReadWeight
from tandem.workers.model.module import WeightSlice

_PAGE: Final = 256  # tokens of a page, transformers' default
_CHUNK: Final = 512
_WARMUP_STEPS: Final = 4
_PREFILL_RUNS: Final = 2  # the first warms up


class TransformersPeer:
    """Runs transformers on the same weights as the engine."""

    def __init__(
        self,
        config: PretrainedConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._vocab_size: int = config.vocab_size
        self._device = device
        kinds = getattr(config, "layer_types", None) or ()
        self._keeps_state = bool({"linear_attention", "conv"} & {*kinds})
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                read(WeightSlice(name, tuple(parameter.shape)), parameter)

    def decode_seconds(self, batch: int, context: int, steps: int) -> float:
        """Returns the median seconds of a decode step of `batch` sequences.

        The sequences begin with `context` tokens.
        """
        prompts = self._prompts(batch, context)
        if self._keeps_state:
            times = self._generate(prompts, 1 + _WARMUP_STEPS + steps)[1 + _WARMUP_STEPS :]
            return float(statistics.median(after - before for before, after in pairwise(times)))
        prefill_steps = -(-batch * context // _CHUNK)
        results = self._generate_batch(prompts, prefill_steps + _WARMUP_STEPS + steps)
        # All sequences decode from the last one's first token to the first one's last.
        begin = max(result.timestamps[0] for result in results)
        end = min(result.timestamps[-1] for result in results)
        times = [stamp for stamp in results[0].timestamps if begin <= stamp <= end][_WARMUP_STEPS:]
        return float(statistics.median(after - before for before, after in pairwise(times)))

    def prefill_seconds(self, num_tokens: int) -> float:
        """Returns the seconds from a single prompt's start to its first token."""
        prompts = self._prompts(1, num_tokens)
        return min(self._prefill(prompts) for _ in range(_PREFILL_RUNS))

    def _prefill(self, prompts: list[list[int]]) -> float:
        if self._keeps_state:
            begin, first = self._generate(prompts, 1)
            return first - begin
        (result,) = self._generate_batch(prompts, 2)
        return float(result.timestamps[0] - result.lifespan[0])

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """Runs `generate`; returns the time at its start and after each token of the batch."""
        times = [time.perf_counter()]

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts, device=self._device)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._greedy(num_tokens),
            stopping_criteria=[note],
        )
        return times

    def _greedy(self, num_tokens: int) -> GenerationConfig:
        """Returns the options of greedy sampling that no token ends."""
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )

    def _generate_batch(self, prompts: list[list[int]], num_tokens: int) -> list[Any]:
        settings: dict[str, Any] = {"allow_block_sharing": False}
        if self._device.type == "cpu":  # its default takes nearly all of the machine's memory
            pages = len(prompts) * -(-(len(prompts[0]) + num_tokens) // _PAGE)
            settings |= {"num_blocks": pages + 1, "max_batch_tokens": max(_CHUNK, len(prompts))}
        results = self._model.generate_batch(
            prompts,
            generation_config=self._greedy(num_tokens),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            record_timestamps=True,
        )
        # transformers only logs errors.
        if len(results) < len(prompts) or any(each.error for each in results.values()):
            raise RuntimeError("transformers' generate_batch failed")
        return list(results.values())

    def _prompts(self, batch: int, num_tokens: int) -> list[list[int]]:
        chooser = random.Random(f"{batch} {num_tokens}")
        return [chooser.choices(range(self._vocab_size), k=num_tokens) for _ in range(batch)]
