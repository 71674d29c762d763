"""README.md and its translation are in step, and what all pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from duoka.cli import cli
from tests.docs.pages import CHINESE, DOCS, ENGLISH, LINK, PAGES, blocks, name, outside_blocks

HAN = re.compile(r"[\u4e00-\u9fff]")


def levels(text: str) -> list[int]:
    return [len(line.split(" ")[0]) for line in outside_blocks(text).splitlines() if line.startswith("#")]


def shown(page: Path) -> list[tuple[str, list[str]]]:
    """Code blocks without comments, which are translated."""
    return [(kind, [line.split("  #")[0].rstrip() for line in body.splitlines()]) for kind, body in blocks(page)]


def table_rows(text: str) -> list[int]:
    """The number of cells of every row of every table."""
    return [line.count("|") for line in outside_blocks(text).splitlines() if line.startswith("|")]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_the_translation_has_the_same_headings_blocks_tables_and_links() -> None:
    english, chinese = ENGLISH.read_text(), CHINESE.read_text()
    assert levels(chinese) == levels(english)
    assert shown(CHINESE) == shown(ENGLISH)
    assert table_rows(chinese) == table_rows(english)
    assert len(outside_blocks(chinese).split("\n\n")) == len(outside_blocks(english).split("\n\n"))
    to_each_other = {ENGLISH.name, CHINESE.name}
    assert [link for link in LINK.findall(chinese) if link not in to_each_other] == [
        link for link in LINK.findall(english) if link not in to_each_other
    ]


def test_the_translation_is_one() -> None:
    """Every paragraph has Chinese in it, but those that have no words."""
    for english, chinese in zip(
        *(outside_blocks(page.read_text()).split("\n\n") for page in (ENGLISH, CHINESE)), strict=True
    ):
        assert HAN.search(chinese) or chinese == english or english.startswith("[中文]"), chinese


def test_the_readme_is_short() -> None:
    assert len(ENGLISH.read_text().splitlines()) <= 120


def test_a_page_lists_every_option_of_duoka_run() -> None:
    table = outside_blocks((DOCS / "command-line.md").read_text())
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    words = {word for option in command.params for word in option.opts if word.startswith("--")} - {"--help"}
    assert not [word for word in words if f"`{word}`" not in table]


@pytest.mark.parametrize("page", PAGES, ids=name)
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
