"""Print the lowest versions that pyproject.toml allows, as constraints for pip.

python tools/lowest.py > build/lowest.txt
pip install -c build/lowest.txt -e '.[dev,docs,examples]'
"""

from __future__ import annotations

import re
from pathlib import Path

TABLES = ("dependencies", "examples")


def lowest(project: str) -> list[str]:
    """`name==version` for each `name>=version` of what duoka and its examples need, given pyproject.toml's text."""
    lists = re.findall(rf"^(?:{'|'.join(TABLES)}) = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    return [f"{name}=={version}" for text in lists for name, version in re.findall(r'"([\w.-]+)>=([\d.]+)', text)]


if __name__ == "__main__":
    print("\n".join(lowest((Path(__file__).parents[1] / "pyproject.toml").read_text())))
