"""The status board and the process that writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duoka.publishing import bars, output, steps, values
from duoka.supervision.status_board import StatusBoard, StatusSlot
from duoka.system.imports import after_import


@dataclass
class Publisher:
    """Writes for one rank. active: False in a process that the script has forked, which writes nothing."""

    board: StatusBoard
    slot: StatusSlot
    active: bool = True
    place: dict[str, Any] = field(default_factory=dict)

    def stop(self) -> None:
        """Write nothing any more."""
        self.active = False

    def show(self, **place: Any) -> None:
        """Write what has changed of the script's place in its loops and progress bars."""
        self.place |= place
        self.board.told.place(self.place)


def publish(board: StatusBoard, rank: int, tells: bool) -> Publisher:
    """Let the script of this process write to the board from now on.

    tells: it is the rank whose lines, values and progress are shown.
    """
    publisher = Publisher(board, board.slot(rank))
    os.register_at_fork(after_in_child=publisher.stop)
    after_import("torch", lambda torch: steps.install(publisher, tells))
    if tells:
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
