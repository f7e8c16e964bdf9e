"""Checks the pages: their length, that what they name exists, and that they state no ratio to a
peer.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
MAX_README_WORDS = 1_300
MAX_GLOSSARY_LINES = 40


def test_the_readme_is_short_and_links_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MAX_README_WORDS
    assert {f"({page})" for page in PAGES[1:]} <= set(re.findall(r"\(docs/[\w-]+\.md\)", text))


def test_the_glossary_is_short() -> None:
    assert len((ROOT / "docs" / "glossary.md").read_text().splitlines()) <= MAX_GLOSSARY_LINES


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    files = [
        ROOT / name
        for name in re.findall(
            r"`((?:tests|cluster|workers|router|proto|docs|k8s)/[\w./]+)[:`]", text
        )
    ]
    assert [str(path) for path in links + files if not path.exists()] == []
