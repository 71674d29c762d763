"""The status board and the process that writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duoka.process import Process
from duoka.publishing import bars, output, steps, values
from duoka.publishing.epochs import EpochLoops
from duoka.supervision.status_board import StatusBoard, StatusSlot
from duoka.system.modules import after_import


@dataclass
class Publisher:
    """Writes the progress of one rank to the status board.

    shows_script: lines, values and progress of this rank are shown. active: False in a process that the script has
    forked, which writes nothing.
    """

    board: StatusBoard
    slot: StatusSlot
    shows_script: bool = True
    active: bool = True
    place: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loops = EpochLoops(self)

    def took(self, nanoseconds: int, samples: int, number: int, of: int) -> None:
        """Record a batch that the main thread has taken from a loader.

        nanoseconds: time it took. number: of the batch, counted from 1. of: the length of the loader; 0: unknown.
        """
        if not self.active:
            return
        if number == 1 and self.shows_script:
            self.loops.look()
        self.slot.load(nanoseconds, samples, number, of)

    def join(self, process: Process) -> None:
        """Also publish what the API of this process reports."""
        process.took = self.took
        if self.shows_script:
            process.logged = self.board.script_output.log

    def stop(self) -> None:
        """Write nothing any more."""
        self.active = False

    def show(self, **place: Any) -> None:
        """Update parts of the script's place in its loops and progress bars."""
        self.place |= place
        self.board.script_output.show_loops(self.place)


def publish(board: StatusBoard, rank: int, shows_script: bool) -> Publisher:
    """Let the script of this process write to the board from now on. shows_script: as for `Publisher`."""
    publisher = Publisher(board, board.slot(rank), shows_script)
    os.register_at_fork(after_in_child=publisher.stop)
    after_import("torch", lambda torch: steps.install(publisher))
    if shows_script:
        output.install(publisher)
        for name, install in _AWAITED:
            after_import(name, _bound(install, publisher))
    return publisher


_AWAITED: tuple[tuple[str, Callable[[Publisher, Any], None]], ...] = (
    ("torch.utils.tensorboard.writer", values.install_tensorboard),
    ("wandb.sdk.wandb_run", values.install_wandb),
    ("tqdm.std", bars.install_tqdm),
    ("rich.progress", bars.install_rich),
)


def _bound(install: Callable[[Publisher, Any], None], publisher: Publisher) -> Callable[[Any], None]:
    return lambda module: install(publisher, module)
