"""Five hundred damaged copies of a model's folder, and fifty of one that runs by transformers'
code: each is refused in one line of ours, or is a model that runs, and the next good folder has the
    tokens that it had.
"""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.router.frontend.tokenizer import Tokenizer
from tandem.tests.tiny import make_tiny_model
from tandem.tests.tiny_decoders import make_tiny_decoder
from tandem.tests.workers.model.helpers import Driver, load, prompt
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.loader import open_checkpoint

NUM_FOLDERS = 500
NUM_GENERIC_FOLDERS = 50
WEIGHTS = "model.safetensors"
HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**40,
        1e308,
        -0.5,
        "",
        "x" * 10_000,
        "../../etc/passwd",
        "\u0000",
        "\udc00",
        "\n",
        [],
        {},
    ),
    *(
        [[]],
        {"x": {}},
        [1] * 1_000,
        {"rope_type": "yarn", "factor": -1},
        ["GPT2LMHeadModel"],
        "float8",
        "auto",
    ),
)
LEAK = re.compile(r"Traceback|File \"|\.py\b|/(?:work|tmp|home|usr|root|opt)/|0x[0-9a-f]{6}|\n")

Damage = Callable[[Path, random.Random], None]


def cut(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as open_file:
        open_file.truncate(rng.randint(0, file.stat().st_size - 1))


def change(file: Path, rng: random.Random) -> None:
    """Changes some bytes, in the first of them half of the times: there are the sizes and the
    header of weights.
    """
    data = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(rng.choice([len(data), min(len(data), 4_000)]))] = rng.randrange(256)
    file.write_bytes(data)


def lengthen(file: Path, rng: random.Random) -> None:
    with file.open("ab") as open_file:
        open_file.write(rng.randbytes(rng.randint(1, 100)))


def replace_by_nothing(file: Path, rng: random.Random) -> None:
    file.unlink()
    kind = rng.randrange(5)
    if kind == 1:
        file.mkdir()
    elif kind == 2:
        os.mkfifo(file)
    elif kind == 3:
        file.symlink_to(rng.choice(["/etc/hostname", "nothing", "../outside", "."]))
    elif kind == 4:
        file.write_bytes(b"")


def put_value(tree: Any, rng: random.Random) -> Any:
    """Puts a hostile value somewhere into a JSON document."""
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return rng.choice(HOSTILE)
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.3:
            place[key] = rng.choice(HOSTILE)
            return tree
        place = place[key]


def change_value(file: Path, rng: random.Random) -> None:
    if file.suffix == ".json":
        file.write_text(json.dumps(put_value(json.loads(file.read_text()), rng)))
        return
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(put_value(json.loads(data[8 : 8 + size]), rng)).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


DAMAGES: tuple[Damage, ...] = (
    cut,
    change,
    lengthen,
    replace_by_nothing,
    change_value,
    change_value,
    change_value,
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("good") / "model")


def serve(folder: Path) -> list[int]:
    """What a worker does with a folder, but for the engine."""
    return Driver(load(folder, num_blocks=8)).generate(1, prompt(20), 3)


def refusal(read: Callable[[Path], object], folder: Path, documented: type[Exception]) -> str:
    """Returns why a folder is refused, empty if it is not, without the folder's own path."""
    try:
        read(folder)
    except documented as error:
        return str(error).replace(str(folder), "FOLDER")
    return ""


@pytest.mark.parametrize(
    ("code", "num_folders"), [("tandem", NUM_FOLDERS), ("transformers", NUM_GENERIC_FOLDERS)]
)
def test_a_worker_refuses_damaged_folders_in_a_line(
    code: str, num_folders: int, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    make_tiny_model(good) if code == "tandem" else make_tiny_decoder(good, "cohere")
    rng, num_refused = random.Random(15), 0
    expected = serve(good)
    (tmp_path / "outside").write_text("{}")
    folder = tmp_path / "model"
    names = sorted(path.name for path in good.iterdir())
    for _ in range(num_folders):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        name = rng.choice([*names, WEIGHTS, "config.json", "config.json"])
        damage = rng.choice(DAMAGES)
        damage(folder / name, rng)
        refused = refusal(open_checkpoint, folder, CheckpointError)
        assert not LEAK.search(refused), (name, damage, refused)
        assert len(refused) < 500, (name, damage)
        num_refused += bool(refused)
        if not refused:
            with suppress(CheckpointError):
                assert len(serve(folder)) == 3
    assert num_folders // 4 < num_refused < num_folders
    assert serve(good) == expected


def test_a_router_refuses_damaged_tokenizers_in_a_line(good: Path, tmp_path: Path) -> None:
    rng, num_refused = random.Random(15), 0
    folder = tmp_path / "model"
    names = [
        name
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
        if (good / name).exists()
    ]
    before = Tokenizer.load(good)
    for _ in range(NUM_FOLDERS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in names:
            shutil.copy(good / name, folder / name)
        rng.choice(DAMAGES)(folder / rng.choice(names), rng)
        refused = refusal(Tokenizer.load, folder, ValueError)
        assert not LEAK.search(refused), refused
        num_refused += bool(refused)
    assert NUM_FOLDERS // 4 < num_refused < NUM_FOLDERS
    after = Tokenizer.load(good)
    assert (after.vocab_size, after.special_ids) == (before.vocab_size, before.special_ids)
