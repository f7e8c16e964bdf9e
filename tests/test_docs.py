"""Checks the pages: their length, that the paths, links, anchors and tests in them exist, and that
README links to every page.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
MAX_README_WORDS = 1_600
MAX_GLOSSARY_LINES = 40


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def names_of_tests() -> set[str]:
    """Returns the names of all test functions."""
    pattern = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for path in files for name in pattern.findall(path.read_text())}


def test_the_readme_is_short_and_links_to_every_top_level_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MAX_README_WORDS
    pages = {f"({page})" for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert pages <= set(re.findall(r"\(docs/[\w-]+\.md\)", text))


@pytest.mark.parametrize("page", [page for page in PAGES if page.count("/") == 2])
def test_the_index_of_a_folder_links_to_its_pages(page: str) -> None:
    folder = (ROOT / page).parent
    assert f"({folder.name}/{Path(page).name})" in folder.with_suffix(".md").read_text()


def test_the_glossary_is_short() -> None:
    assert len((ROOT / "docs" / "glossary.md").read_text().splitlines()) <= MAX_GLOSSARY_LINES


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / link for link in re.findall(r"\]\(([\w./-]+)[)#]", text)]
    files = [
        ROOT / name
        for name in re.findall(
            r"`((?:tests|cluster|workers|router|proto|docs|k8s)/[\w./]+)[:`]", text
        )
    ]
    assert [str(path) for path in links + files if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_exist(page: str) -> None:
    source = ROOT / page
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", source.read_text())
    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors(source.parent / link if link else source)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_tests_on_a_page_exist(page: str) -> None:
    named = re.findall(r"`(?:[\w/.]+::)?(test_\w+)`", (ROOT / page).read_text())
    assert sorted(set(named) - names_of_tests()) == []
