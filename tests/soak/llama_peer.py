"""Prints how fast llama.cpp decodes in one stream: `PYTHON llama_peer.py GGUF THREADS TOKENS
ROUNDS`, where PYTHON has llama-cpp-python. Without Tandem, whose packages that Python need not
have.
"""

import importlib
import statistics
import sys
import time
from itertools import islice
from typing import Any


def main() -> None:
    gguf, threads, num_tokens, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    library: Any = importlib.import_module("llama_cpp")
    model = library.Llama(
        gguf,
        n_ctx=1024,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        logits_all=False,
    )
    rates = []
    for number in range(1 + rounds):
        prompt = model.tokenize(
            f"Chapter {number}. A letter from a small town by the sea.".encode()
        )
        tokens = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        next(tokens)
        began = time.perf_counter()
        counted = sum(1 for _ in islice(tokens, num_tokens))
        rates.append(counted / (time.perf_counter() - began))
        tokens.close()
    print(statistics.median(rates[1:]))


if __name__ == "__main__":
    main()
