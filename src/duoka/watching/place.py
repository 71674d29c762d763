"""Where a script is in its epochs, batches and progress bars, and how long it will take, as far as that is known.

Time left is never guessed: it needs a loop over a known number of epochs, or a progress bar with a total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from duoka.supervision.status_board import Batches, StatusBoard
from duoka.system.messages import duration


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers count from 1; 0: not known.

    epoch: of `epochs`, in the loop at `loop` (`train.py:41`). batch: of `batches`, of the loader read last.
    bar: name, done and total of the outermost progress bar. left: seconds until the end of the loop over epochs, or
    of the bar. at_most: the loop may end earlier, by a `break` or `return`.
    """

    epoch: int = 0
    epochs: int = 0
    loop: str = ""
    batch: int = 0
    batches: int = 0
    bar: tuple[str, float, float] | None = None
    left: float | None = None
    at_most: bool = False

    def words(self) -> str:
        """Describe it: `epoch 3 of 10, batch 120 of 400, about 0:12:30 left`; empty if nothing is known."""
        found = []
        if self.epochs:
            found.append(f"epoch {self.epoch} of {self.epochs}")
        if self.bar is not None:
            name, done, total = self.bar
            found.append(f"{name or 'progress bar'} {done:,.10g} of {total:,.10g}")
        elif self.batch:
            found.append(f"batch {self.batch:,}" + (f" of {self.batches:,}" if self.batches else ""))
        if self.left is not None:
            about = "at most about" if self.at_most else "about"
            which = "" if self.epochs else " of this bar"
            found.append(f"{about} {duration(self.left)} left{which}")
        return ", ".join(found)


def read_place(board: StatusBoard, now: float) -> Place:
    """Read the place of a run's first rank. now: CLOCK_MONOTONIC."""
    levels, batches = board.script_output.loops(), board.batches(board.ranks.start)
    epochs, bars = levels.get("epochs"), levels.get("bars") or []
    place: dict[str, Any] = {"batch": batches.batch, "batches": batches.batches}
    if bars:
        first = bars[0]
        place["bar"] = first["name"], first["done"], first["total"]
        if first["rate"]:
            place["left"] = max(0.0, first["total"] - first["done"]) / first["rate"]
    if epochs:
        left = _left(epochs, batches, now)
        place |= {"epoch": epochs["done"] + 1, "epochs": epochs["rounds"], "loop": epochs["place"], "left": left}
        place["at_most"] = epochs["ends_early"]
    return Place(**place)


def _left(epochs: dict[str, Any], batches: Batches, now: float) -> float | None:
    """Estimate the seconds for the remaining epochs from the mean of those before; None before any progress."""
    within = batches.trained / batches.trained_of if batches.trained_of else 0.0
    done = epochs["done"] - epochs["first"] + min(1.0, within)
    if done <= 0:
        return None
    seconds: float = now - epochs["begun"]
    left: float = seconds / done * (epochs["rounds"] - epochs["first"] - done)
    return max(0.0, left)
