"""`duoka watch`: show what the runs of this user on this machine do."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import click

from duoka.cli.gpus import signals_that_end
from duoka.errors import OptionError
from duoka.hardware import inventory
from duoka.hardware.gpu import Gpu
from duoka.system.messages import printable
from duoka.watching import showing
from duoka.watching.page import WatchedRun, serving
from duoka.watching.record import FollowedRun, RunRecord, published_runs
from duoka.watching.watcher import RunState, RunWatcher

STEP = 0.5  # seconds between two looks
WIDTH = 240  # columns, if standard output is not a terminal

HELP = """\
Show what the runs of this user on this machine do: steps and samples a second, the parts of each rank's time, the
slowest rank, memory and use of the devices, restarts, and what stands out. Watching does not slow the runs down. Ends
when they end. PID: the process of one `duoka run`; without it, all.
"""

NOTHING = "nothing runs: start something with `duoka run train.py`, and `duoka watch` in another terminal"


def watch(pid: int | None, as_json: bool, once: bool, as_page: bool) -> Callable[[], int]:
    """Return the function that watches."""
    if as_page:
        if as_json or once:
            raise click.UsageError("--page excludes --json and --once", click.get_current_context())
        return partial(_serve, pid)
    return partial(_watch, pid, as_json, once)


def _watch(pid: int | None, as_json: bool, once: bool) -> int:
    looks = _looks(pid, once)  # a generator: it has not looked yet
    runs = _runs(pid)
    if not runs and pid is not None:
        raise OptionError("PID", pid, "that of a running `duoka run` of yours", "`duoka watch` shows all")
    if not runs:
        click.echo(showing.as_line({"event": "nothing"}) if as_json else NOTHING)
        return 0
    with suppress(KeyboardInterrupt, BrokenPipeError):  # `duoka watch --json | head`
        if as_json:
            for states, ended in looks:
                for data in (*map(showing.as_data, states), *map(showing.end_as_data, ended)):
                    click.echo(showing.as_line(data))
        elif once or not sys.stdout.isatty():
            _print_last(looks)
        else:
            _draw(looks)
    return 0


def _serve(pid: int | None) -> int:
    """Serve a page about one run until Ctrl-C, also after the run has ended."""
    runs = _runs(pid)
    if len(runs) != 1:
        several = ", ".join(f"{record.pid} ({printable(record.name)})" for record in _runs(None))
        hint = f"there are {several}" if several else "nothing runs"
        raise OptionError("PID", pid, "that of one running `duoka run` of yours", hint)
    watched = WatchedRun(runs[0])
    followed = FollowedRun(runs[0])
    with suppress(KeyboardInterrupt), signals_that_end(), serving(watched.page) as address:
        click.echo(f"{address}\n(on this machine only; Ctrl-C ends it)")
        while runs:
            watched.look(runs[0], _gpus(runs))
            time.sleep(STEP)
            # The kernel may have given the pid to another run.
            runs = [record for record in _runs(runs[0].pid) if record.begun == runs[0].begun]
        watched.end(followed.read())
        click.echo("the run has ended; the page stays until Ctrl-C")
        signal.pause()
    return 0


def _runs(pid: int | None) -> list[RunRecord]:
    """Return the run of the command process `pid`; None: all runs, each once.

    An engine may start several commands for a run on one machine; the first of all shows the ranks of the others.
    """
    runs = list(published_runs())
    first = {record.run for record in runs if record.machine == 0}
    shown = (record for record in runs if record.machine == 0 or record.run not in first)
    return [record for record in runs if record.pid == pid] if pid is not None else list(shown)


Look = tuple[list[RunState], list[RunState]]  # of the runs that go on, and the last ones of those that have ended


def _looks(pid: int | None, once: bool) -> Iterator[Look]:
    """Look at all runs twice a second, until there are none. once: yield two looks."""
    watchers: dict[tuple[int, float], tuple[RunWatcher, FollowedRun]] = {}
    before: dict[tuple[int, float], RunState] = {}
    looks = 0
    while True:
        runs = _runs(pid)
        gpus = _gpus(runs)
        states = {}
        for record in runs:
            run = record.pid, record.begun
            if run not in watchers:
                watchers[run] = RunWatcher(record), FollowedRun(record)
            states[run] = watchers[run][0].look(record, gpus)
        ended = []
        for run in before.keys() - states.keys():  # its file is gone, and still readable by who has opened it
            followed = watchers.pop(run)[1]
            ended.append(replace(before[run], record=followed.read()))
            followed.close()
        yield list(states.values()), ended
        before = states
        looks += 1
        if not runs or (once and looks == 2):
            return
        time.sleep(STEP)


def _gpus(runs: list[RunRecord]) -> dict[str, Gpu]:
    """Return the GPUs by the names of devices; the driver is asked only if a run computes on one."""
    if not any(device.startswith("GPU ") for record in runs for device in record.devices):
        return {}
    cards = inventory.read().gpus
    return {f"GPU {gpu.number}": gpu for card in cards for gpu in (card, *card.parts)}


def _print_last(looks: Iterator[Look]) -> None:
    """Print the second look, which knows speeds; the first one if the runs end before."""
    from rich.console import Console

    # For a file rich would take 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    first = next(looks)
    console.print(showing.as_tables(next(looks, first)[0] or first[0], console.width))


def _draw(looks: Iterator[Look]) -> None:
    """Redraw the tables in the terminal, and leave the last ones there with the end of each run."""
    from rich.live import Live

    with signals_that_end(), ExitStack() as ending:
        live = Live(auto_refresh=False, transient=False)
        ending.callback(live.stop)  # before it starts, as in `duoka gpus --watch`
        live.start()
        for states, ended in looks:
            for state in ended:
                live.console.print(showing.end_in_words(state), highlight=False, markup=False)
            if states:
                live.update(showing.as_tables(states, live.console.width), refresh=True)


command = click.Command(
    "watch",
    callback=watch,
    help=HELP,
    params=[
        click.Argument(["pid"], type=int, required=False),
        click.Option(["--json", "as_json"], is_flag=True, help="A line of JSON for each run, twice a second."),
        click.Option(["--page", "as_page"], is_flag=True, help="Serve a page about one run, on this machine only."),
        click.Option(["--once"], is_flag=True, help="Measure for half a second, print, and end."),
    ],
)
