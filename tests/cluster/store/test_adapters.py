"""Tests which adapters a router serves by its configuration."""

from pathlib import Path

from tandem.cluster.config import load_config
from tandem.cluster.store.adapters import configured_adapters
from tandem.router.request import LoraAdapter


def test_changes_are_served_from_the_configured_folders_only(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    inside, outside = (
        LoraAdapter(name=name, folder=str(tmp_path / folder), fingerprint=bytes(16))
        for name, folder in (("inside", "real/sql"), ("outside", "other/sql"))
    )
    changes = {"inside": (1, inside), "outside": (2, outside)}
    cases: list[tuple[str | None, list[LoraAdapter]]] = [
        (str(tmp_path / "link"), [inside]),
        (None, []),
    ]
    for folder, expected in cases:
        registry = configured_adapters(load_config(None, {"model": "m", "lora.folder": folder}))
        registry.learn(changes)
        assert registry.adapters == expected
