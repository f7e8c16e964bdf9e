"""Tests for which model folders the renderer of chat templates starts early."""

from pathlib import Path

import pytest

from tandem.router.frontend import template


class Renderer:
    """Counts its starts."""

    num_starts = 0

    def start(self) -> None:
        self.num_starts += 1


@pytest.mark.parametrize(
    ("files", "num_starts"),
    [
        ({}, 0),
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, 0),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, 1),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"}, 1),
        ({"chat_template.json": "{}"}, 1),
    ],
)
def test_the_renderer_starts_early_if_the_folder_has_a_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], num_starts: int
) -> None:
    renderer = Renderer()
    monkeypatch.setattr(template, "RENDERER", renderer)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    template.start_for(tmp_path)
    assert renderer.num_starts == num_starts
