"""The pages cover what there is: public names, errors, decisions; and their messages are those of the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

import duoka
from duoka import errors
from tests.docs.pages import DOCS, ENGLISH, name, outside_blocks
from tests.flows.flow import ROOT, surroundings

TROUBLE = (DOCS / "troubleshooting.md").read_text()
PICTURES = sorted((DOCS / "how").glob("*.svg"))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a source, with … where a value is put in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(it.value) if isinstance(it, ast.Constant) else "…" for it in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


SAID = [text for path in (ROOT / "src").rglob("*.py") for text in texts(ast.parse(path.read_text()))]
MESSAGES = re.findall(r"^\| (?:a traceback of the worker, or )?`([^`]*(?: [^`]*)?)` \(?", TROUBLE, re.MULTILINE)


def test_every_error_is_explained() -> None:
    classes = [
        name for name, it in vars(errors).items() if isinstance(it, type) and issubclass(it, errors.DuokaError)
    ]
    without = {"DuokaError"}  # the parent of all
    assert len(classes) > 15
    for one in set(classes) - without:
        assert f"`{one}`" in TROUBLE, one


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_code(message: str) -> None:
    """Each piece between two … stands in one text of the source, in this order."""
    pieces = [piece for piece in message.split("…") if len(piece.strip()) > 2]
    assert pieces
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(pattern.search(text) for text in SAID), message


def test_there_are_many() -> None:
    assert len(MESSAGES) > 30


def test_the_reference_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: duoka\.(\w+)", (DOCS / "reference.md").read_text(), re.MULTILINE))
    in_errors = {it for it in duoka.__all__ if hasattr(errors, it)}
    assert shown == {*duoka.__all__, "errors"} - in_errors - {"__version__"}


@pytest.mark.parametrize("picture", PICTURES, ids=name)
def test_pictures_are_clear_in_light_and_dark_mode(picture: Path) -> None:
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert ElementTree.fromstring(text).find("{*}title") is not None
    page = picture.with_suffix(".md").read_text()
    assert page.count(f"]({picture.name})") == 1


def test_every_page_of_how_it_works_has_its_picture() -> None:
    assert [picture.stem for picture in PICTURES] == sorted(page.stem for page in (DOCS / "how").glob("*.md"))


def test_every_guide_is_reached_from_the_start() -> None:
    """By its table, or by the navigation of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in [*DOCS.glob("*.md"), *DOCS.glob("how/*.md")]:
        assert f" {page.relative_to(DOCS)}\n" in navigation, page


def test_pages_are_not_longer_than_a_reader_bears() -> None:
    for page in [ENGLISH, *DOCS.glob("*.md"), *DOCS.glob("how/*.md")]:
        words = len(outside_blocks(page.read_text()).split())
        assert words < 3000 or page.name == "figures.md", (page.name, words)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [
        Path(sys.executable).with_name("mkdocs"),
        "--quiet",
        "build",
        "--strict",
        "--site-dir",
        tmp_path / "site",
    ]
    environment = surroundings({"NO_MKDOCS_2_WARNING": "1"})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part in ("source/examples/api.py", "decisions/0001-one-command-process/index.html"):
        assert (tmp_path / "site" / part).exists(), part
    reference = (tmp_path / "site/reference/index.html").read_text()
    for shown in duoka.__all__:
        assert (
            shown == "__version__" or f'id="duoka.{shown}"' in reference or f'id="duoka.errors.{shown}"' in reference
        )
