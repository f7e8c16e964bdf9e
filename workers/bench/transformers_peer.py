"""The same figures of transformers, whose continuous batching is the peer on a machine that runs no other server."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ..model.config import ModelConfig
from ..model.weights import Weights
from .floor import synchronize

_PAGE: Final = 256  # tokens of a page, transformers' default
_CHUNK: Final = 512
_WARMUP_STEPS: Final = 4
_PREFILL_RUNS: Final = 2  # the first warms up


class TransformersPeer:
    """transformers on the very weights that the engine ran on. `method` says which of its two ways is measured:
    generate_batch, else generate on a padded batch, where this version or device has no generate_batch that works."""

    def __init__(self, config: ModelConfig, weights: Weights, *, folder: Path | None) -> None:
        """The config comes from `folder` where one is given, else from the shape."""
        self._vocab_size = config.vocab_size
        self._device = weights.device
        peer_config = AutoConfig.from_pretrained(folder) if folder else _config(config)
        with weights.device:
            self._model = AutoModelForCausalLM.from_config(peer_config, dtype=weights.dtype).eval()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights.take(name))
        self.method = "generate_batch" if self._has_continuous_batching() else "generate"

    def decode_seconds(self, batch: int, context: int, steps: int) -> float:
        """Median seconds of a step that decodes `batch` sequences of `context` tokens and more."""
        prompts = self._prompts(batch, context)
        if self.method == "generate":
            first = self._generate(prompts, 1)
            return (self._generate(prompts, 1 + steps) - first) / steps
        prefill_steps = -(-batch * context // _CHUNK)
        results = self._generate_batch(prompts, prefill_steps + _WARMUP_STEPS + steps)
        # All sequences decode from the last one's first token to the first one's last.
        begin = max(result.timestamps[0] for result in results)
        end = min(result.timestamps[-1] for result in results)
        times = [stamp for stamp in results[0].timestamps if begin <= stamp <= end][_WARMUP_STEPS:]
        return float(statistics.median(after - before for before, after in pairwise(times)))

    def prefill_seconds(self, num_tokens: int) -> float:
        """Seconds from a lone prompt's start to its first token."""
        prompts = self._prompts(1, num_tokens)
        return min(self._prefill(prompts) for _ in range(_PREFILL_RUNS))

    def _prefill(self, prompts: list[list[int]]) -> float:
        if self.method == "generate":
            return self._generate(prompts, 1)
        (result,) = self._generate_batch(prompts, 2)
        return float(result.timestamps[0] - result.lifespan[0])

    def _has_continuous_batching(self) -> bool:
        if not hasattr(self._model, "generate_batch") or not hasattr(transformers, "ContinuousBatchingConfig"):
            return False
        # It logs what goes wrong and returns what it has.
        results = self._generate_batch(self._prompts(1, 4), 2)
        return len(results) == 1 and results[0].error is None and bool(results[0].timestamps)

    def _generate_batch(self, prompts: list[list[int]], num_tokens: int) -> list[Any]:
        settings: dict[str, Any] = {"allow_block_sharing": False}
        if self._device.type == "cpu":  # it would take nearly all of the machine's memory
            pages = len(prompts) * -(-(len(prompts[0]) + num_tokens) // _PAGE)
            settings |= {"num_blocks": pages + 1, "max_batch_tokens": max(_CHUNK, len(prompts))}
        results = self._model.generate_batch(
            prompts,
            generation_config=_greedy(num_tokens),
            continuous_batching_config=transformers.ContinuousBatchingConfig(**settings),
            record_timestamps=True,
        )
        return list(results.values())

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self._device)

        def run() -> None:
            self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(num_tokens))

        return _seconds(run, self._device)

    def _prompts(self, batch: int, num_tokens: int) -> list[list[int]]:
        chooser = random.Random(f"{batch} {num_tokens}")
        return [chooser.choices(range(self._vocab_size), k=num_tokens) for _ in range(batch)]


def _greedy(num_tokens: int) -> Any:
    return GenerationConfig(  # type: ignore[no-untyped-call]  # no token ends it
        do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
    )


def _seconds(function: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - begin


def _config(config: ModelConfig) -> Any:
    kept = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    fields = asdict(config)
    return AutoConfig.for_model(
        config.architecture.removesuffix("ForCausalLM").lower(),
        **{name: fields[name] for name in (*kept, "tie_word_embeddings")},
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        sliding_window=config.windows[0],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
