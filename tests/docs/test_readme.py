"""README.md and its translation are in step, and what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.flows.flow import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [ENGLISH, CHINESE, *ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def outside_blocks(text: str) -> str:
    return BLOCK.sub("", text)


def levels(text: str) -> list[int]:
    return [len(line.split(" ")[0]) for line in outside_blocks(text).splitlines() if line.startswith("#")]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Code blocks without comments, which are translated."""
    return [
        (kind, [line.split("  #")[0].rstrip() for line in body.splitlines()]) for kind, body in BLOCK.findall(text)
    ]


def table_rows(text: str) -> list[int]:
    """The number of cells of every row of every table."""
    return [line.count("|") for line in outside_blocks(text).splitlines() if line.startswith("|")]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_the_translation_has_the_same_headings_blocks_tables_and_links() -> None:
    english, chinese = ENGLISH.read_text(), CHINESE.read_text()
    assert levels(chinese) == levels(english)
    assert commands(chinese) == commands(english)
    assert table_rows(chinese) == table_rows(english)
    assert len(outside_blocks(chinese).split("\n\n")) == len(outside_blocks(english).split("\n\n"))
    to_each_other = {ENGLISH.name, CHINESE.name}
    assert [link for link in LINK.findall(chinese) if link not in to_each_other] == [
        link for link in LINK.findall(english) if link not in to_each_other
    ]


@pytest.mark.parametrize("page", dict.fromkeys(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_linked_to_is_there(page: Path) -> None:
    for link in LINK.findall(outside_blocks(page.read_text())):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = [line for line in outside_blocks(target.read_text()).splitlines() if line.startswith("#")]
            assert anchor in map(slug, headings), link
