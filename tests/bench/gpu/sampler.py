"""Measures the sampler: time and memory by the number of rows and the kind of sampling."""

from functools import partial
from typing import Final

import torch

from tandem.tests.bench.gpu.bench import Bench
from tandem.workers.engine.plan import SamplingParams, SequenceStep
from tandem.workers.model.sampling.sampler import Sampler

_KINDS: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(top_k=50),
    "top-p": SamplingParams(top_p=0.9),
    "min-p": SamplingParams(min_p=0.05),
    "top-k and top-p": SamplingParams(top_k=50, top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
    "log probabilities": SamplingParams(logprobs=5),
}
_HISTORY: Final = tuple(range(64))


@torch.inference_mode()
def measure(bench: Bench) -> None:
    """Measures each kind with logits as large as the model's."""
    vocab_size = bench.config.vocab_size
    for num_rows in bench.pick((1, 32, 256), (1, 4)):
        logits = torch.randn(num_rows, vocab_size, device=bench.torch_device).bfloat16()
        for name, params in _KINDS.items():
            sampler = Sampler(vocab_size, (), None, bench.torch_device)
            steps = [_step(sampler, number, params) for number in range(num_rows)]
            bench.reset_peak()
            before = bench.memory_mib()
            bench.time(f"{name}, {num_rows} rows", partial(sampler, logits, steps))
            if bench.is_gpu:
                peak = bench.memory_mib(peak=True) - before
                bench.row(f"{name}, {num_rows} rows: peak", mib=peak)


def _step(sampler: Sampler, number: int, params: SamplingParams) -> SequenceStep:
    step = SequenceStep(
        sequence_id=number,
        token_ids=_HISTORY,
        start=0,
        new_blocks=(),
        sampling=params,
        num_samples=1,
        history=_HISTORY if params.needs_history else (),
        num_prompt=len(_HISTORY),
    )
    sampler.admit(step, params)
    return step
