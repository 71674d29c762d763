"""Progress bars on a terminal, and lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, TextIO, cast

from torch import Tensor

from duoka.data.pieces import Pieces
from duoka.logs.console import line
from duoka.logs.values import number_of
from duoka.private.torch import tree_leaves
from duoka.system.imports import without_draws
from duoka.system.seconds import duration

EVERY = 10.0  # seconds between two plain lines


class Progress:
    """Iterates over batches and shows the progress. Created by `run.progress`."""

    def __init__(self, batches: Iterable[Any], name: str, shown: bool, stream: TextIO | None) -> None:
        self._batches, self._name = batches, name
        self._shown, self._stream = shown and stream is not None, stream
        self._values: dict[str, Any] = {}

    def show(self, **values: Any) -> None:
        """Show values beside the bar: `bar.show(loss=loss)`. They replace those of the previous call.

        A tensor is read only when the bar is drawn.
        """
        self._values = values

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[Any]:
        if not self._shown:
            yield from self._batches
            return
        total = None
        with suppress(TypeError):  # a stream has no length
            total = len(self)
        stream = self._stream or sys.stdout
        kind = _Bar if stream.isatty() else _Lines
        with kind(self._name, total, stream) as display:
            for batch in self._batches:
                yield batch
                display.advance(_samples(batch), self._values)


class _Lines:
    """Prints a line every few seconds, and one at the end."""

    def __init__(self, name: str, total: int | None, stream: TextIO) -> None:
        self._name, self._total, self._stream = name, total, stream
        self._done = self._samples = 0
        self._begun = self._said = time.monotonic()
        self._values: dict[str, Any] = {}

    def __enter__(self) -> _Lines:
        return self

    def advance(self, samples: int, values: dict[str, Any]) -> None:
        """Count one more batch."""
        self._done, self._samples, self._values = self._done + 1, self._samples + samples, values
        if time.monotonic() - self._said > EVERY:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        seconds = max(self._said - self._begun, 1e-9)
        of = f" of {self._total}" if self._total is not None else ""
        left = ""
        if self._total is not None and self._done < self._total:
            left = f", {duration(seconds / max(self._done, 1) * (self._total - self._done))} left"
        words = [f"{self._name}: batch {self._done}{of}", f"{self._samples / seconds:.4g} samples/s{left}"]
        words += [line(None, {name: number_of(name, value)}) for name, value in self._values.items()]
        print(", ".join(words), file=self._stream, flush=True)

    def __exit__(self, *error: object) -> None:
        self._say()


class _Bar:
    """A progress bar by the library rich, redrawn up to four times a second."""

    def __init__(self, name: str, total: int | None, stream: TextIO) -> None:
        with without_draws():  # rich draws the number of its first link
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        columns += [TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[values]}")]
        self._bar = Bar(*columns, console=Console(file=stream), refresh_per_second=4)
        self._task = self._bar.add_task(name, total=total, rate="", values="")
        self._samples, self._begun, self._drawn = 0, time.monotonic(), 0.0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def advance(self, samples: int, values: dict[str, Any]) -> None:
        """Count one more batch."""
        self._samples += samples
        now = time.monotonic()
        fields: dict[str, Any] = {}
        if now - self._drawn > 0.25:  # reading a number makes the script wait for its GPU
            self._drawn = now
            fields["rate"] = f"{self._samples / max(now - self._begun, 1e-9):.4g} samples/s"
            fields["values"] = line(None, {name: number_of(name, value) for name, value in values.items()})
        self._bar.update(self._task, advance=1, **fields)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _samples(batch: Any) -> int:
    """Return the number of samples in a batch: the rows of its first tensor."""
    if isinstance(batch, Pieces):
        return batch.n
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return 1 if first is None else first.shape[0]
