"""Compares the time of a batch of prompts by `tandem.LLM` with that by a service at some
concurrency.

    python -m tandem.tests.soak.offline --model smollm2-135m-instruct

Rounds of both take turns, each in processes of its own, alone on the machine. Both have the same
random prompts, as token ids, and generate the same number of tokens; loading and a first small
batch are not measured. Prints each round and the medians; exits with 1 if the service's median is
better.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tandem import LLM, AsyncClient, SamplingParams
from tandem.cluster.eval.gather import map_concurrently

_TANDEM: Final = (sys.executable, "-c", "from tandem.cluster.cli.main import main; main()")
_VOCAB: Final = 8_192  # ids below are in the model's vocabulary
_NUM_FIRST: Final = 4  # prompts that are not measured
_START_SECONDS: Final = 300.0
# a slow machine refuses none of the requests that are counted
_CONFIG: Final = "router: {max_queue_seconds: 3600}"


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Returns random prompts, the same for a seed."""
    rng = random.Random(seed)
    return [[rng.randrange(3, _VOCAB) for _ in range(length)] for _ in range(count)]


def measure(generate: Callable[[list[list[int]]], int], args: argparse.Namespace) -> float:
    """Returns the output tokens/s of the batch."""
    generate(make_prompts(_NUM_FIRST, args.input_len, seed=1))
    prompts = make_prompts(args.num_prompts, args.input_len, seed=0)
    began = time.perf_counter()
    return generate(prompts) / (time.perf_counter() - began)


def measure_llm(args: argparse.Namespace) -> float:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.output_len)
    with LLM(args.model, dtype=args.dtype) as llm:

        def generate(prompts: list[list[int]]) -> int:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, progress=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return measure(generate, args)


def measure_service(args: argparse.Namespace, folder: str) -> float:
    ports = ("--grpc-port", "0", "--http-port", "0", "--ops-port", "0")
    config = Path(folder, "config.yaml")
    config.write_text(_CONFIG)
    command = [
        *_TANDEM,
        "serve",
        args.model,
        "--dtype",
        args.dtype,
        "--config",
        str(config),
        *ports,
    ]
    service = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert service.stdout is not None
        address = service.stdout.readline().split()[2].removeprefix("grpc=")

        async def ask(prompts: list[list[int]]) -> int:
            async def one(prompt: Sequence[int]) -> int:
                answer = await client.generate(
                    prompt, temperature=0, ignore_eos=True, max_tokens=args.output_len
                )
                return len(answer.token_ids)

            async with AsyncClient(address) as client:
                return sum(await map_concurrently(one, prompts, args.concurrency))

        return measure(lambda prompts: asyncio.run(ask(prompts)), args)
    finally:
        service.terminate()
        service.wait(_START_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", choices=("llm", "service"), help=argparse.SUPPRESS
    )  # in a process of its own
    args = parser.parse_args()
    if args.only:
        with tempfile.TemporaryDirectory() as folder:
            print(measure_llm(args) if args.only == "llm" else measure_service(args, folder))
        return 0
    found: dict[str, list[float]] = {"llm": [], "service": []}
    for number in range(1, args.rounds + 1):
        for kind, rates in found.items():
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--only", kind]
            rates.append(
                float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            )
            print(f"round {number}, {kind:8}{rates[-1]:10.1f} output tokens/s", flush=True)
    llm, service = (statistics.median(rates) for rates in found.values())
    print(
        f"median: llm {llm:.1f}, service at concurrency {args.concurrency} {service:.1f}: "
        f"{llm / service:.2f} times"
    )
    return int(llm < service)


if __name__ == "__main__":
    sys.exit(main())
