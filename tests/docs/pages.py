"""The pages of the project, and what they show."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.flows.flow import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
DOCS = ROOT / "docs"
PAGES = list(
    dict.fromkeys([ENGLISH, CHINESE, *ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *ROOT.glob("examples/*/*.md")])
)
EXAMPLES = sorted([*ROOT.glob("examples/*.py"), ROOT / "examples/crnn/train.py"])
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(duoka (?!starts )|make |pip |python |torchrun |\.venv/bin/)[^ ]")


class Block(NamedTuple):
    """kind: `python`: ours, and run; `py`: another library's; `text`: what a program says; none: commands."""

    kind: str
    body: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    return [Block(kind, textwrap.dedent(body)) for _, kind, body in BLOCK.findall(page.read_text())]


def outside_blocks(text: str) -> str:
    return BLOCK.sub("", text)


def commands(path: Path) -> Iterator[list[str]]:
    """Every line that begins with a program's name, in a block without a kind, or in the docstring of a script; as
    words, without its comment."""
    if path.suffix == ".py":
        lines = path.read_text().split('"""')[1].splitlines()
    else:
        lines = [line for block in blocks(path) if not block.kind for line in block.body.splitlines()]
    for line in map(str.strip, lines):
        if COMMAND.match(line):
            yield shlex.split(re.split(r"  +#? ?(?=[^ ])", line)[0])
