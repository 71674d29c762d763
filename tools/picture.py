"""`python tools/picture.py`: run the example under `python` and `duoka run`, and draw what the terminal showed.

Writes docs/run.svg. Nothing in the picture is written by hand: commands, lines and exit codes are those of real runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/digits.py"
COMMANDS = (
    ("python", EXAMPLE, "--epochs", "4"),
    ("duoka", "run", "--devices", "cpu:2", EXAMPLE, "--epochs", "4"),
)


def picture(commands: tuple[tuple[str, ...], ...]) -> str:
    """An SVG of a terminal in which the commands are run one after the other.

    Raises:
        RuntimeError: a command fails; its output is in the message.
    """
    console = Console(record=True, width=80, file=StringIO(), force_terminal=True)
    folder = Path(sys.executable).parent
    for command in commands:
        done = subprocess.run(
            [folder / command[0], *command[1:]],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        console.print(Text("$ ", "bold green") + Text(" ".join(command), "bold"))
        for line in done.stdout.splitlines():
            console.print(Text(line, "cyan" if line.startswith("duoka:") else ""))
    return console.export_svg(title="the same script, the same numbers", unique_id="duoka")


def main() -> None:
    """Draw the picture of the README."""
    (ROOT / "docs/run.svg").write_text(picture(COMMANDS), encoding="utf-8")


if __name__ == "__main__":
    main()
