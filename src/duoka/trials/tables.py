"""Format a rich table as text."""

from __future__ import annotations

import io
import shutil
import sys

from rich.console import Console
from rich.table import Table

WIDTH = 240  # columns, if standard output is not a terminal


def render_table(table: Table) -> str:
    """Format a table as text, as wide as the terminal if there is one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(table)
    written: str = console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in written.splitlines())
