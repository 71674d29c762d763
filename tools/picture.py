"""`python tools/picture.py [run] [watch]`: the pictures of the README, from real runs; without a name, both.

run: the example under `python` and `duoka run`, as the terminal showed them, in docs/run.svg.
watch: the report of a run of the example, as chromium shows it, in docs/watch.png.
Nothing in them is written by hand: commands, lines, exit codes and charts are those of the runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/digits.py"
SIZE = "960,1335"  # pixels of the page's picture
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


def photograph(to: Path) -> None:
    """Write a picture of the report of a run, as a browser shows it.

    Raises:
        RuntimeError: there is no chromium.
        subprocess.CalledProcessError: the run or the browser failed; its output is in the terminal.
    """
    browser = shutil.which("chromium")
    if browser is None:
        raise RuntimeError("a picture of the page needs chromium; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "run.html"
        words = ["run", "--quiet", "--devices", "cpu:2", "--report", str(report), EXAMPLE, "--epochs", "60"]
        subprocess.run([Path(sys.executable).parent / "duoka", *words], cwd=ROOT, check=True)
        shot = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        subprocess.run(
            [browser, *shot, f"--window-size={SIZE}", f"--screenshot={to}", report.as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )


def main() -> None:
    """Draw the pictures of the README."""
    names = sys.argv[1:] or ["run", "watch"]
    if "run" in names:
        (ROOT / "docs/run.svg").write_text(picture(COMMANDS), encoding="utf-8")
    if "watch" in names:
        photograph(ROOT / "docs/watch.png")


if __name__ == "__main__":
    main()
