"""`duoka gpus`: show the GPUs of this machine and their users."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

import click

from duoka.errors import DeviceError
from duoka.hardware import inventory, machine, table
from duoka.hardware.allocation import read_with_holders
from duoka.hardware.gpu import Gpu
from duoka.watching.record import published_runs

STEP = 1.0  # seconds between two updates

HELP = """\
Show each GPU: number, name, UUID, memory, utilisation, temperature and power; its processes, and the duoka run that
has locked it. Numbers are those of the driver's program, such as nvidia-smi. Without a GPU, show the CPU.
"""


def gpus(watch: bool, as_json: bool, processes: bool) -> Callable[[], int] | int:
    """Print the table once, or return the function that updates it."""
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other", click.get_current_context())
    if watch:
        return partial(_watch, processes)
    if as_json:
        click.echo(json.dumps(table.as_json(_look(), machine.read()), indent=2))
    else:
        click.echo("\n".join(_lines(processes)))
    return 0


def _look() -> inventory.Inventory:
    seen = read_with_holders()
    ranks = {
        pid: f"rank {rank} of run {run.pid}"
        for run in published_runs()
        for rank, pid in zip(run.ranks, run.pids, strict=True)
    }
    return replace(seen, gpus=tuple(_with_ranks(card, ranks) for card in seen.gpus)) if ranks else seen


def _with_ranks(card: Gpu, ranks: Mapping[int, str]) -> Gpu:
    """Return a GPU with the rank of each of its processes. ranks: by pid, in words."""
    processes = card.processes and tuple(replace(user, run=ranks.get(user.pid, "")) for user in card.processes)
    return replace(card, processes=processes, parts=tuple(_with_ranks(part, ranks) for part in card.parts))


def _lines(processes: bool) -> list[str]:
    return table.lines(_look(), machine.read(), processes)


def _watch(processes: bool) -> int:
    """Redraw the table until q is pressed. Needs a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise DeviceError("--watch needs a terminal; leave it out, or use --json")
    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        return Text("\n".join([*_lines(processes), "", "q quits"]), no_wrap=True, overflow="ellipsis")

    with suppress(KeyboardInterrupt), signals_that_end(), _keys() as pressed, ExitStack() as ending:
        live = Live(shown(), screen=True, auto_refresh=False)
        ending.callback(live.stop)  # before it starts: a signal may arrive meanwhile
        live.start(refresh=True)
        while "q" not in pressed(STEP).lower():
            live.update(shown(), refresh=True)
    return 0


@contextmanager
def signals_that_end() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP by an exception, so that the terminal is restored."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read keys without waiting for Enter; yields a function that waits up to so many seconds for some."""
    import select
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return (os.read(file, 64).decode(errors="ignore") or "q") if ready else ""  # the end of the input counts as q

    try:
        tty.setcbreak(file)
        now = termios.tcgetattr(file)
        now[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the terminal in the wrong mode
        termios.tcsetattr(file, termios.TCSADRAIN, now)
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(file, termios.TCSADRAIN, before)


command = click.Command(
    "gpus",
    callback=gpus,
    help=HELP,
    params=[
        click.Option(["-w", "--watch"], is_flag=True, help="Update every second; q quits."),
        click.Option(["--json", "as_json"], is_flag=True, help="As data: bytes, percent, °C and watts."),
        click.Option(["-p", "--processes"], is_flag=True, help="A line for each process, with its full command."),
    ],
)
