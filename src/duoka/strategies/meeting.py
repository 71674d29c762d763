"""Where the copies of one call meet, which compute in threads of one process: draws, and statistics of all rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.cut import Cut
from duoka.view.draws import draw_again_from, draw_own_rows, shape_drawn, state_drawn_from
from duoka.view.learning import Place, spec_at
from duoka.view.norm import Normalising, all_but_channels, channels, combined
from duoka.view.site import user_line
from duoka.view.view import View


class Meeting:
    """Each copy brings something, and gets what all have brought."""

    def __init__(self, copies: int, timeout: float) -> None:
        self._barrier = threading.Barrier(copies, timeout=timeout)
        self._brought: list[tuple[str, Any]] = [("", None)] * copies
        self._timeout = timeout

    def exchange(self, number: int, what: str, value: Any) -> list[Any]:
        """What all copies have brought, in their order.

        Raises:
            Refused: another copy came with something else: they have gone different ways.
            BrokenBarrierError: another failed, or did not come in time.
        """
        self._brought[number] = (what, value)
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        other = next((name for name, _ in brought if name != what), None)
        if other is not None:
            raise Refused(
                f"the model's copies have gone different ways: one came to {what}, another to {other}; a forward "
                "pass that depends on the values of its rows cannot be shared out by strategy='dp'"
            )
        return [value for _, value in brought]

    def leave(self) -> None:
        """This copy failed: the others need not wait for it."""
        self._barrier.abort()

    def lost(self, number: int) -> str:
        """What is said where no copy raised an error of its own."""
        return f"copy {number} of the model waited {self._timeout:g} s for another one"


class Draws:
    """The random numbers of one call: each draw is made as one device would, and every copy takes its rows.

    places: where the batch is in each draw, in order. Copies come to a draw in any order, and each time it begins
    from the state that it began from first.
    """

    def __init__(self, places: tuple[Place | None, ...], view: View) -> None:
        self.places = places
        self._view = view
        self._lock = threading.Lock()
        self._states: list[Any] = []  # before each draw
        self._latest: dict[Any, Any] = {}  # of each generator, after all draws so far; None: torch's own

    def draw(self, place: int, cut: Cut, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw number `place`, for the rows of `cut`."""
        if place >= len(self.places):
            raise Refused(f"the model draws more random numbers than in its first call ({user_line()})")
        generator = kwargs.get("generator")
        with self._lock:
            now = state_drawn_from(kwargs)
            is_new = place == len(self._states)
            if is_new:
                self._states.append(self._latest.get(generator, now))
            draw_again_from(self._states[place], kwargs)
            try:
                return self._rows(self.places[place], cut, func, args, kwargs)
            finally:
                if is_new:
                    self._latest[generator] = state_drawn_from(kwargs)
                draw_again_from(now, kwargs)

    def _rows(self, place: Place | None, cut: Cut, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if place is None:
            return func(*args, **kwargs)
        spec = spec_at(self._view, place, shape_drawn(args, kwargs), cut)
        return draw_own_rows(func, args, kwargs, spec, place.order)

    def finish(self) -> None:
        """All copies are through: generators go on behind what was drawn."""
        for generator, state in self._latest.items():
            draw_again_from(state, {"generator": generator})


@dataclass
class CopySeat:
    """One copy in one call: which rows it has, and how far it is."""

    number: int
    cut: Cut
    draws: Draws
    meeting: Meeting
    drawn: int = 0
    exchanged: int = 0
    told: list[list[Any]] = field(default_factory=list)  # what came of each exchange, to be repeated
    repeating: bool = False

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random operator."""
        self.drawn += 1
        return self.draws.draw(self.drawn - 1, self.cut, func, args, kwargs)

    def from_here(self) -> Callable[[], CopySeat]:
        """Makes seats for going through the same once more: nothing new is drawn, nobody is waited for."""
        drawn, exchanged = self.drawn, self.exchanged
        return lambda: replace(self, drawn=drawn, exchanged=exchanged, repeating=True)

    def _exchange(self, value: Any) -> list[Any]:
        place, self.exchanged = self.exchanged, self.exchanged + 1
        if self.repeating:
            told = list(self.told[place])
            told[self.number] = value
            return told
        self.told.append(self.meeting.exchange(self.number, "a BatchNorm", value))
        return self.told[-1]

    def batch_norm(self, call: Normalising) -> Tensor:
        """With the statistics of all copies' rows.

        In operations of torch's own: each copy's mean and variance are part of every other's graph.
        """
        rows = call.rows
        dense = rows if rows.dtype == torch.float64 else rows.float()
        var, mean = torch.var_mean(dense, dim=all_but_channels(rows), correction=0)
        told = self._exchange((mean, var, rows.numel() // rows.shape[1]))
        means = torch.stack([one.to(rows.device) for one, _, _ in told])
        variances = torch.stack([one.to(rows.device) for _, one, _ in told])
        counts = torch.tensor([count for *_, count in told], device=rows.device)
        mean, var = combined(means, variances, counts)
        call.keep(mean, var, counts.sum())
        shape = channels(rows)
        out = (dense - mean.view(shape)) * (var + call.eps).rsqrt().view(shape)
        if call.weight is not None:
            out = out * call.weight.view(shape)
        if call.bias is not None:
            out = out + call.bias.view(shape)
        return out.to(rows.dtype)
