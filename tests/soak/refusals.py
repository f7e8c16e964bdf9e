"""Times how soon a model that cannot run is refused: `python -m tandem.tests.soak.refusals`.

Broken folders, hostile configs and GGUF files with hostile headers, those of the tests, are given
to `tandem check`; where only the numbers of the weights are wrong, which it does not read, a
worker's loader has them. Each must be refused in one line that names a file. Prints how many were,
and the slowest, which are then timed as commands of their
own: these also start Python with torch and, for transformers' code, transformers, which takes most
of their time. Ends with 1 if one was not refused, or took longer than five seconds in this process.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import torch
from typer.testing import CliRunner

from tandem.cluster.cli.main import app
from tandem.tests.cluster.store.test_gguf import HOSTILE
from tandem.tests.tiny import TINY, make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import load
from tandem.tests.workers.model.test_checkpoint import ARCHITECTURES, BAD, QUERY, edit_tensors
from tandem.tests.workers.model.test_generic import write_config
from tandem.workers.model.config import CheckpointError

_SECONDS: Final = 5.0
_NUM_SLOWEST: Final = 5
_TANDEM: Final = (sys.executable, "-c", "from tandem.cluster.cli.main import main; main()")
_NAMES_FILE: Final = re.compile(
    r"(config|generation_config|tokenizer|model)[\w.-]*\.(json|safetensors|gguf)|x\.gguf|model-"
)
# What is wrong for our code only: transformers' has it, or does not read the field.
_OF_OURS: Final = ("activation", "not a number", "rope with bad factors", "partial rotary")

Make = Callable[[Path], Path]
"""Makes a broken model below a folder, and returns it."""


def broken() -> Iterator[tuple[str, Make]]:
    """Yields all that `tandem check` must refuse, by name."""
    for name, (damage, _) in BAD.items():
        yield name, partial(_damaged, make_tiny_model, damage)
        if name not in _OF_OURS:
            yield (
                f"{name}, transformers' code",
                partial(
                    _damaged,
                    partial(make_tiny_decoder, kind="cohere", tie_word_embeddings=False),
                    damage,
                ),
            )
    for family, architecture in ARCHITECTURES.items():
        for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            for value in (10**9, -1, "2", [2]):
                config = TINY[family][0](**TINY[family][1]).to_dict() | {
                    field: value,
                    "architectures": [architecture],
                }
                yield f"{family}, {field} {value}", partial(_config_alone, config)
    for kind in ("mamba2", "qwen3_next", "lfm2", "bloom", "whisper"):
        yield kind, partial(_kind_alone, kind)
    for name, (data, _) in HOSTILE.items():
        yield f"GGUF, {name}", partial(_gguf, data)


def _damaged(make: Callable[[Path], Path], damage: Callable[[Path], object], folder: Path) -> Path:
    damage(make(folder))
    return folder


def _config_alone(config: dict[str, object], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _kind_alone(kind: str, folder: Path) -> Path:
    folder.mkdir()
    write_config(folder, kind)
    return folder


def _gguf(data: bytes, folder: Path) -> Path:
    folder.mkdir()
    (folder / "x.gguf").write_bytes(data)
    return folder / "x.gguf"


def check(model: Path) -> str:
    """Returns why `tandem check` refuses a model; empty if it does not."""
    result = CliRunner().invoke(app, ["check", str(model)])
    line = result.output.rstrip("\n").rpartition("\n")[2]
    return (
        line.removeprefix(f"{model}: refused: ")
        if result.exit_code == 1 and ": refused: " in line
        else ""
    )


def not_finite(value: float, model: Path) -> str:
    """Returns why a worker does not load a model, one of whose weights is `value`."""

    def put(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUERY][3, 5] = value

    edit_tensors(put)(model)
    try:
        load(model)
    except CheckpointError as error:
        return str(error)
    return ""


def main() -> int:
    cases = [(name, make, check) for name, make in broken()]
    cases += [
        (f"weight {value}", make_tiny_model, partial(not_finite, value))
        for value in (math.nan, math.inf)
    ]
    times: dict[str, float] = {}
    failed: list[str] = []
    for name, make, refuse in cases:
        with tempfile.TemporaryDirectory() as root:
            os.environ["TANDEM_HOME"] = root
            model = make(Path(root, "model"))
            began = time.perf_counter()
            reason = refuse(model)
            times[name] = time.perf_counter() - began
        if not _NAMES_FILE.match(reason):
            failed.append(f"{name}: {reason or 'not refused'}")
    print(
        f"{len(times) - len(failed)} of {len(times)} refused; the slowest, s, and as a command of "
        "its own:"
    )
    makes = dict(broken())
    alone = {
        name: _command_seconds(makes[name])
        for name in sorted(makes, key=lambda each: -times[each])[:_NUM_SLOWEST]
    }
    for name, seconds in alone.items():
        print(f"{times[name]:8.2f}{seconds:8.2f}  {name}")
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed) or max(times.values()) > _SECONDS)


def _command_seconds(make: Make) -> float:
    with tempfile.TemporaryDirectory() as root:
        model = make(Path(root, "model"))
        began = time.perf_counter()
        subprocess.run(
            [*_TANDEM, "check", model], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
