"""How the test scripts are shared out, and what every rank computes whole of each: a table of docs/plain-scripts.md.

python tools/shares.py            prints it
python tools/shares.py --write    puts it into the page
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests/flows/scripts"
PAGE = ROOT / "docs/plain-scripts.md"
BEGIN, END = "<!-- tools/shares.py -->", "<!-- end -->"

FIRST_BATCH = re.compile(r"batch (\d+ = .*)")
WHOLE = re.compile(r"computed whole by every rank: (\S+) at \S+?:(\d+), ")


def table() -> Iterator[str]:
    """The lines of the table, one script after the other."""
    yield "| script | first batch | computed whole, at line |"
    yield "|---|---|---|"
    for script in sorted(SCRIPTS.glob("*.py")):
        said = _run(script)
        first = FIRST_BATCH.search(said)
        whole = defaultdict(list)
        for operation, line in WHOLE.findall(said):
            whole[operation].append(int(line))
        listed = "; ".join(f"`{name}` {', '.join(map(str, sorted(lines)))}" for name, lines in sorted(whole.items()))
        yield f"| {script.stem} | {first[1] if first else ''} | {listed or '-'} |"


def _run(script: Path) -> str:
    """What duoka says of a run on two workers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "duoka",
            "run",
            "--verbose",
            "--devices",
            "cpu:2",
            str(script),
            f"{folder}/saved.pt",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stderr


def main() -> None:
    """Print the table, or write it into the page."""
    lines = list(table())
    if "--write" not in sys.argv[1:]:
        print("\n".join(lines))
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]))


if __name__ == "__main__":
    main()
