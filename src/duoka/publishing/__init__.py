"""Publish a script's progress for `duoka watch` and reports: its own process writes it to the status board.

Steps of optimizers, batches of loaders, printed lines, values of TensorBoard and W&B, progress bars of tqdm and rich,
and the epochs of `duoka.Checkpoint`. Nothing here imports torch: each function waits until the script has imported
what it observes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from duoka.origins.process import Process
from duoka.supervision.rings import TEXT
from duoka.supervision.status_board import StatusBoard
from duoka.system.messages import observe
from duoka.system.user_code import after_import

MOST_ITERATORS = 64  # that are remembered
EVERY = 0.1  # seconds between two states of progress bars
MOST_BARS = 4
LONGEST = 40  # characters of a bar's name

_LINE_ENDS = re.compile(r"(\r?\n|\r)")


def publish(board: StatusBoard, rank: int, shows_script: bool) -> Publisher:
    """Let the script of this process write to the board from now on. shows_script: as for `Publisher`."""
    publisher = Publisher(board, rank, shows_script)
    os.register_at_fork(after_in_child=publisher.stop)
    after_import("torch", lambda torch: _count_steps(publisher))
    after_import("torch", lambda torch: _time_loaders(publisher))
    if shows_script:
        observe_output(publisher)
        for name, install in (
            ("torch.utils.tensorboard.writer", observe_tensorboard),
            ("wandb.sdk.wandb_run", observe_wandb),
            ("tqdm.std", observe_tqdm),
            ("rich.progress", observe_rich),
        ):
            after_import(name, partial(install, publisher))
    return publisher


class Publisher:
    """Writes the progress of one rank to the status board. shows_script: also its lines, values and loops."""

    def __init__(self, board: StatusBoard, rank: int, shows_script: bool = True) -> None:
        self.board, self.slot, self.shows_script = board, board.slot(rank), shows_script
        self.active = True  # False in a process that the script has forked, which writes nothing
        self._loops: dict[str, Any] = {}

    def took(self, nanoseconds: int, samples: int, number: int, of: int) -> None:
        """Record a batch that the main thread has taken from a loader.

        nanoseconds: time it took. number: of the batch, counted from 1. of: the length of the loader; 0: unknown.
        """
        if self.active:
            self.slot.load(nanoseconds, samples, number, of)

    def began_epoch(self, done: int, count: int) -> None:
        """Show that the script begins an epoch. done: epochs before it, of `count`."""
        if not self.active or not isinstance(count, int):  # a script may count up to infinity
            return
        loop = self._loops.get("epochs")
        if loop is None or done != loop["done"] + 1:  # a loop begins; after a restart with the saved epoch
            loop = {"begun": time.monotonic(), "first": done}
        self.slot.begin_epoch()
        self.show(epochs=loop | {"done": done, "count": count})

    def show(self, **loops: Any) -> None:
        """Update where the script is in its loops and progress bars."""
        self._loops |= loops
        self.board.script_output.show_loops(self._loops)

    def join(self, process: Process) -> None:
        """Also publish what the API of this process reports."""
        process.took = self.took
        if self.shows_script:
            process.logged = self.board.script_output.log
            process.began_epoch = self.began_epoch

    def stop(self) -> None:
        self.active = False


# --- steps of optimizers, and batches that are taken from loaders


def _count_steps(publisher: Publisher) -> None:
    """Record the number of steps: those of the optimizer that has made most."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.hooks import RemovableHandle

    from duoka.private.light import not_compiled

    slot = publisher.slot
    steps: dict[int, int] = {}  # by the id of an existing optimizer: a weak dictionary would take a microsecond
    living: dict[int, weakref.ref[Any]] = {}
    most = 0

    def forget(number: int) -> None:  # before another optimizer gets its id
        steps.pop(number, None)
        living.pop(number, None)

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        name = id(optimizer)
        if name not in steps:
            steps[name] = 0
            living[name] = weakref.ref(optimizer, lambda _: forget(name))
        number = steps[name] = steps[name] + 1
        if number > most and publisher.active:
            most = number
            slot.step(number)

    before, RemovableHandle.next_id = RemovableHandle.next_id, -1  # a script may print the ids of its own hooks
    register_optimizer_step_post_hook(not_compiled(count))  # else a compiled optimizer would be traced through it
    RemovableHandle.next_id = before


def _time_loaders(publisher: Publisher) -> None:
    """Record how long the main thread waits for batches, their samples, and where it is in the loader."""
    from duoka.private.light import NEXT_BATCH, batch_size_of, batches_of, batches_taken

    owner, name = NEXT_BATCH
    take, main, clock, took = getattr(owner, name), threading.get_ident(), time.monotonic_ns, publisher.took
    known: dict[int, tuple[int, int]] = {}  # size and number of batches, by the id of an iterator, from its first on

    def take_timed(batches: Any) -> Any:
        if threading.get_ident() != main or not publisher.active:  # as by a thread that reads ahead
            return take(batches)
        begun = clock()
        batch = take(batches)
        spent = clock() - begun
        taken, iterator = batches_taken(batches), id(batches)
        if taken == 1:  # asked once, as `len` may be a method of the script's own
            if len(known) >= MOST_ITERATORS:
                known.clear()
            known[iterator] = batch_size_of(batches), batches_of(batches)
        size, length = known.get(iterator, (0, 0))
        took(spent, size, taken, length)
        return batch

    setattr(owner, name, take_timed)


# --- lines that the script prints


def observe_output(publisher: Publisher) -> None:
    """Keep the last lines that this process prints with Python on standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):
                observe(stream, keep_lines(publisher))


def keep_lines(publisher: Publisher) -> Callable[[str], None]:
    """Return a function that is called with each text written to a stream, and keeps the lines."""
    output, rest = publisher.board.script_output, ""

    def keep(line: str, redrawn: bool) -> None:
        if line and not line.isspace():
            output.print(line, redrawn)

    def note(text: str) -> None:
        nonlocal rest
        if not publisher.active:
            return
        try:
            if text == "\n":  # `print` writes it by itself
                line, rest = rest, ""
                keep(line, False)
            elif "\n" in text or "\r" in text:
                *ended, rest = _LINE_ENDS.split(rest + text)
                for line, end in zip(ended[::2], ended[1::2], strict=True):
                    keep(line, end == "\r")
            else:
                rest = (rest + text)[:TEXT]
        except Exception:  # the script must not see it
            pass

    return note


# --- values that the script gives to TensorBoard and Weights & Biases


def observe_tensorboard(publisher: Publisher, module: Any) -> None:
    """Observe `SummaryWriter.add_scalar` and `add_scalars`."""

    def scalar(writer: object, tag: str, scalar_value: object, global_step: object = None, *args: object) -> None:
        _log(publisher, global_step, {tag: scalar_value})

    def scalars(
        writer: object, main_tag: str, tag_scalar_dict: Any, global_step: object = None, *args: object
    ) -> None:
        _log(publisher, global_step, {f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()})

    _observe(module.SummaryWriter, "add_scalar", scalar)
    _observe(module.SummaryWriter, "add_scalars", scalars)


def observe_wandb(publisher: Publisher, module: Any) -> None:
    """Observe `wandb.log`, which is a method of the run."""

    def log(run: object, data: Any, step: object = None, *args: object, **options: object) -> None:
        _log(publisher, step, data)

    _observe(module.Run, "log", log)


def _log(publisher: Publisher, step: object, values: Mapping[str, object]) -> None:
    if publisher.active:
        numbers = {name: _number(value) for name, value in values.items()}
        publisher.board.script_output.log(step if isinstance(step, int) else None, numbers)


def _number(value: Any) -> object:
    """Return a number that this rank can read by itself, as a float; anything else as it is."""
    torch = sys.modules["torch"]
    if type(value) is torch.Tensor and value.numel() == 1:  # another type may need the other ranks
        return value.item()
    return float(value) if type(value).__module__ == "numpy" else value


# --- progress bars of tqdm and rich

Bar = dict[str, Any]  # name, done, total, rate (a second, or None)


def observe_tqdm(publisher: Publisher, module: Any) -> None:
    """Observe all bars of tqdm, from the outermost."""
    opened: weakref.WeakSet[Any] = weakref.WeakSet()

    def shown(drawn: Any) -> Iterable[Bar]:
        opened.add(drawn)
        for bar in list(opened):
            if bar.disable or not bar.total:  # closed, or without a total
                opened.discard(bar)
        for bar in sorted(opened, key=lambda bar: abs(getattr(bar, "pos", 0))):
            seconds = time.time() - bar.start_t
            done = bar.n - bar.initial
            yield _bar(bar.desc, bar.n, bar.total, done / seconds if seconds > 0 and done > 0 else None)

    for name in ("refresh", "close"):  # refresh: by `update` and the loop, as often as it is drawn
        _observe_bars(publisher, module.tqdm, name, shown)


def observe_rich(publisher: Publisher, module: Any) -> None:
    """Observe the tasks of rich's progress displays."""

    def shown(progress: Any) -> Iterable[Bar]:
        for task in progress.tasks:
            if task.total and task.visible and not task.finished:
                seconds = task.elapsed or 0.0
                rate = task.completed / seconds if seconds > 0 and task.completed > 0 else None
                yield _bar(task.description, task.completed, task.total, rate)

    for name in ("advance", "update", "stop"):
        _observe_bars(publisher, module.Progress, name, shown)


def _bar(name: Any, done: float, total: float, rate: float | None) -> Bar:
    return {"name": str(name or "").strip(" :")[:LONGEST], "done": done, "total": total, "rate": rate}


def _observe_bars(publisher: Publisher, owner: Any, name: str, shown: Callable[[Any], Iterable[Bar]]) -> None:
    written = 0.0

    def show(display: Any, *args: Any, **options: Any) -> None:
        nonlocal written
        now = time.monotonic()
        if publisher.active and (now - written >= EVERY or name in ("close", "stop")):
            written = now
            publisher.show(bars=list(shown(display))[:MOST_BARS])

    _observe(owner, name, show)


def _observe(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of a method after each call."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        with suppress(Exception):  # the script must not see it
            note(*args, **{key: value for key, value in options.items() if key not in ("walltime", "new_style")})
        return result

    setattr(owner, name, method)
