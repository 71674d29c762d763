"""`duoka gpus`: show the GPUs of this machine and their users."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click

from duoka.errors import DeviceError
from duoka.hardware import machine
from duoka.hardware.allocation import read_with_holders
from duoka.hardware.choice import user_of
from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.inventory import Inventory
from duoka.hardware.machine import Machine
from duoka.watching.record import published_runs

STEP = 1.0  # seconds between two updates
GIB = 1 << 30
HEAD = ("GPU", "name", "UUID", "memory GiB", "util", "temp", "power W", "who")
LONGEST_COMMAND = 60  # characters of a command in a line of the table

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
        click.echo(json.dumps(as_data(_look(), machine.read()), indent=2))
    else:
        click.echo("\n".join(lines(_look(), machine.read(), processes)))
    return 0


def _look() -> Inventory:
    seen = read_with_holders()
    ranks = {
        pid: f"rank {rank} of run {run.pid}"
        for run in published_runs()
        for rank, pid in zip(run.ranks, run.pids, strict=True)
    }
    return replace(seen, gpus=tuple(_with_ranks(card, ranks) for card in seen.gpus)) if ranks else seen


def _with_ranks(card: Gpu, ranks: Mapping[int, str]) -> Gpu:
    """Return a GPU with the rank of each of its processes. ranks: by pid, in words."""
    # No processes are (), and those that the driver does not report are None: both stay.
    processes = card.processes and tuple(replace(user, run=ranks.get(user.pid, "")) for user in card.processes)
    return replace(card, processes=processes, parts=tuple(_with_ranks(part, ranks) for part in card.parts))


def _watch(processes: bool) -> int:
    """Redraw the table until q is pressed. Needs a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise DeviceError("--watch needs a terminal; leave it out, or use --json")
    from rich.live import Live
    from rich.text import Text

    def shown() -> Text:
        rows = lines(_look(), machine.read(), processes)
        # A line for each card, also in a narrow terminal.
        return Text("\n".join([*rows, "", "q quits"]), no_wrap=True, overflow="ellipsis")

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

    # SIGHUP is what a closed terminal sends. The exception unwinds the stack, which the default action does not.
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
        tty.setcbreak(file)  # unlike the raw mode, it keeps Ctrl-C
        now = termios.tcgetattr(file)
        now[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the terminal in the wrong mode
        termios.tcsetattr(file, termios.TCSADRAIN, now)
        yield pressed
    finally:
        with suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(file, termios.TCSADRAIN, before)


# The table.


def lines(seen: Inventory, machine: Machine, processes: bool = False) -> list[str]:
    """Return one line for each GPU, and with `processes` one for each process; without a GPU, the CPU.

    A split GPU (MIG) has a line for each part, numbered 0:1.
    """
    cards = (*seen.gpus, *seen.others)
    if not cards:
        return [f"{machine.host}: no GPU ({seen.no_gpus})", _processor(machine)]
    versions = [f"{what} {version}" for what, version in seen.versions.items() if version]
    rows: list[tuple[str, ...] | str] = [HEAD]
    for card in cards:
        rows += _card(card, processes)
    return [f"{machine.host}: {', '.join(versions) or seen.vendor}", *_aligned(rows)]


def as_data(seen: Inventory, machine: Machine) -> dict[str, Any]:
    """Return the inventory as plain data: bytes, percent, °C and watts; None if unknown."""
    return {"machine": asdict(machine), **asdict(seen)}


def _card(card: Gpu, processes: bool) -> Iterator[tuple[str, ...] | str]:
    yield _row(card, processes)
    if processes and not card.is_split:
        yield from (f"      {_process(process, in_full=True)}" for process in _ordered(card.processes or ()))
    for part in card.parts:
        yield from _card(part, processes)


def _row(card: Gpu, processes: bool) -> tuple[str, ...]:
    power = f"{_figure(card.power)}/{_figure(card.power_limit)}"
    return (
        card.number,
        card.name,
        card.uuid[:12] or "-",
        f"{_gib(card.used)}/{_gib(card.memory or None)}",
        _figure(card.utilisation, "%"),
        _figure(card.temperature, "C"),
        "-" if power == "-/-" else power,
        _who(card, processes),
    )


def _who(card: Gpu, processes: bool) -> str:
    if card.problem:
        return f"not usable: {card.problem}"
    if card.is_split:
        return f"split into {len(card.parts)} parts (MIG)"
    words = []
    if card.holder is not None:
        words.append(f"{card.holder.command} (pid {card.holder.pid}{_since(card.holder.since)})")
    if card.processes is None:
        words.append("the driver does not report who uses it")
    elif not processes:
        words += [_process(process) for process in _ordered(card.processes)]
    return "; ".join(words) or ("" if card.processes else user_of(card) or "free")


def _process(process: GpuProcess, in_full: bool = False) -> str:
    command = process.command or "(not visible from here)"
    if not in_full and len(command) > LONGEST_COMMAND:
        command = command[: LONGEST_COMMAND - 1] + "…"
    memory = "" if process.memory is None else f", {process.memory / GIB:.1f} GiB"
    kind = ", graphics" if process.kind == "graphics" else ""
    run = f", {process.run}" if process.run else ""
    return f"{process.user or '?'}: {command} (pid {process.pid}{memory}{kind}{run}{_since(process.since)})"


def _since(seconds: float | None) -> str:
    """Return `, since 14:05`, or with the date if that was another day."""
    if not seconds:
        return ""
    then = time.localtime(seconds)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime(", since %H:%M" if is_today else ", since %Y-%m-%d %H:%M", then)


def _ordered(processes: Iterable[GpuProcess]) -> list[GpuProcess]:
    return sorted(processes, key=lambda process: (process.kind, -(process.memory or 0), process.pid))


def _processor(machine: Machine) -> str:
    load = " ".join(f"{figure:.2f}" for figure in machine.load)
    memory = f"{machine.used / GIB:.1f}/{machine.memory / GIB:.1f} GiB"
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    return f"CPU  {machine.processor}  {cores}  load {load}  memory {memory}"


def _aligned(rows: Sequence[tuple[str, ...] | str]) -> list[str]:
    """Pad columns to equal width; a row that is a string stays as it is."""
    columns = zip(*(row for row in rows if not isinstance(row, str)), strict=True)
    widths = [max(map(len, column)) for column in columns]

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return [row if isinstance(row, str) else line(row) for row in rows]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _figure(figure: float | None, unit: str = "") -> str:
    return "-" if figure is None else f"{figure:.0f}{unit}"


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
