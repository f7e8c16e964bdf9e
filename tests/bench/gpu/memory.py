"""Compares the memory that a model takes with the prediction."""

from typing import Final

import torch

from tandem.tests.bench.gpu.bench import NEEDS_GPU, Bench
from tandem.tests.workers.model.helpers import Driver, prompt
from tandem.workers.engine.plan import SamplingParams
from tandem.workers.model.footprint import kv_bytes_per_token
from tandem.workers.model.loader import weight_bytes

_MIB: Final = 2**20
_HEAVY: Final = SamplingParams(top_p=0.9, temperature=1.0, repetition_penalty=1.1, logprobs=5)


def measure(bench: Bench) -> None:
    """Measures weights, KV cache, warm-up, the largest chunk and the largest sampled batch."""
    config = bench.config
    kind = bench.torch_device.type
    num_blocks = bench.pick(4096, 256)
    predicted = {
        "weights": weight_bytes(config, 1, "bfloat16", kind),
        "KV cache": num_blocks * 16 * kv_bytes_per_token(config, 1, "bfloat16"),
    }
    before = bench.memory_mib()

    def loaded(stage: str) -> None:
        nonlocal before
        after = bench.memory_mib()
        facts = {"predicted_mib": predicted[stage] / _MIB} if stage in predicted else {}
        bench.row(stage, mib=after - before, **facts)
        before = after

    runner = bench.load(num_blocks, on_loaded=loaded).runner
    driver = Driver(runner)
    bench.reset_peak()
    driver.run(driver.step(1000, prompt(bench.chunk), 0))
    bench.row(f"peak of a chunk of {bench.chunk}", mib=bench.memory_mib(peak=True) - before)
    driver.drop(1000)
    batch = bench.pick(256, 4)
    driver.run(*(driver.step(number, prompt(4), 0, _HEAVY) for number in range(batch)))
    bench.reset_peak()
    driver.run(*(driver.step(number, [7], 4) for number in range(batch)))
    bench.row(f"peak of {batch} sampled rows", mib=bench.memory_mib(peak=True) - before)
    if bench.is_gpu:
        reserved = torch.cuda.memory_reserved(bench.torch_device) / _MIB
        free, total = torch.cuda.mem_get_info(bench.torch_device)
        bench.row("allocator", reserved_mib=reserved, outside_mib=(total - free) / _MIB - reserved)
    else:
        bench.row("allocator", note=NEEDS_GPU)
