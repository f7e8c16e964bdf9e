"""What a model folder from a stranger can hold beside a model: links, pipes, code, pickles."""

import json
import os
from pathlib import Path

import pytest

from tandem.workers.model.checkpoint import read_tensors
from tandem.workers.model.config import CheckpointError
from tandem.workers.model.generic.context import read_context_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return made


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    for name, target in (
        ("tokenizer.json", "../secret.json"),
        ("generation_config.json", str(tmp_path / "secret.json")),
    ):
        (folder / name).symlink_to(target)
        with pytest.raises(
            CheckpointError, match=f"^{name}: is a link that leads out of the model's folder$"
        ):
            read_context_tokens(folder)
        (folder / name).unlink()
    assert read_context_tokens(folder) == 64


def test_a_folder_that_is_linked_in_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (folder / "additional_chat_templates").symlink_to("../other")
    with pytest.raises(CheckpointError, match="leads out"):
        read_context_tokens(folder)
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=r"^tool_use\.jinja: is a link"):
        read_context_tokens(folder)


def test_pipes_devices_and_dangling_links_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is neither"):
        read_context_tokens(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("nothing")
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json: is neither"):
        read_context_tokens(folder)


def test_links_within_the_folder_and_in_the_cache_of_the_hub_are_taken(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "again.json").symlink_to("config.json")
    (tmp_path / "linked").symlink_to(folder)
    assert read_context_tokens(tmp_path / "linked") == 64
    repository = tmp_path / "models--org--tiny"
    commit, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    commit.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1f").write_text((folder / "config.json").read_text())
    (commit / "config.json").symlink_to("../../blobs/1f")
    assert read_context_tokens(commit) == 64
    (commit / "tokenizer.json").symlink_to("../../../model/config.json")
    with pytest.raises(CheckpointError, match="leads out"):
        read_context_tokens(commit)


def test_blobs_may_be_those_that_the_cache_of_the_hub_shares(folder: Path, tmp_path: Path) -> None:
    """As huggingface_hub 2 keeps large files; a folder of blobs without its mark is none of the
    hub's.
    """
    cache = tmp_path / "hub"
    repository, store = cache / "models--org--tiny", cache / "blobs"
    commit, shared = repository / "snapshots" / ("a" * 40), store / "ab" / ("ab" * 32)
    for each in (commit, repository / "blobs", shared.parent):
        each.mkdir(parents=True)
    shared.write_text((folder / "config.json").read_text())
    (repository / "blobs" / "1f").symlink_to(f"../../blobs/ab/{shared.name}")
    (commit / "config.json").symlink_to("../../blobs/1f")
    with pytest.raises(CheckpointError, match=r"config\.json: is a link that leads out"):
        read_context_tokens(commit)
    (store / ".huggingface-shared-blobs").write_text("1\n")
    assert read_context_tokens(commit) == 64


def test_a_repository_of_the_cache_is_no_model_folder(tmp_path: Path) -> None:
    for name in ("refs", "blobs", "snapshots"):
        (tmp_path / name).mkdir()
    text = "this is a repository in the hub's cache: give one of the folders in its snapshots"
    with pytest.raises(CheckpointError, match=text):
        read_context_tokens(tmp_path)


def test_a_folder_that_is_called_snapshots_is_no_cache_of_the_hub(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.json").write_text("{}")
    model = tmp_path / "snapshots" / "model"
    model.parent.mkdir()
    folder.rename(model)
    (model / "extra.json").symlink_to("../../secret.json")
    with pytest.raises(CheckpointError, match=r"extra\.json: is a link that leads out"):
        read_context_tokens(model)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.safetensors.pkl"]
)
def test_weights_that_can_run_code_are_not_read(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(CheckpointError, match="reading it may run code"):
        read_tensors(folder)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 7, None, ""]
)
def test_an_index_cannot_name_a_file_elsewhere(folder: Path, file: object) -> None:
    index = {"weight_map": {"x": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match="is not the name of a safetensors file in the folder"
    ):
        read_tensors(folder)
