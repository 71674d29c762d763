"""Play drawn programs on one device and on ranks, and keep what differs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from tests.fuzz.compare import Difference, calls, difference, play_on_one_device, script, smallest
from tests.fuzz.crossing import crossed
from tests.fuzz.draws import programs
from tests.fuzz.gradients import Gradients
from tests.fuzz.layers import layers
from tests.fuzz.loading import Loading
from tests.fuzz.modules import Modules
from tests.fuzz.operating import operating
from tests.fuzz.optimizing import Optimizing
from tests.fuzz.program import DEVICE, Program
from tests.fuzz.ranks import Ranks
from tests.fuzz.setting import Setting
from tests.fuzz.views import Views

SHARDED = ("ddp", "exact", "fsdp", "offload")
DIES_ON_CARDS = r"\.put_\(|, 99\)\)|y \+ 3"  # its indices out of range end the process's use of the card
FAMILIES: dict[str, tuple[SearchStrategy[Program], tuple[str, ...]]] = {
    "views": (programs(lambda draws: Views(draws).program()), ("ddp", "exact")),
    "gradients": (programs(lambda draws: Gradients(draws).program()), ("ddp", "exact")),
    "modules": (programs(lambda draws: Modules(draws).program()), SHARDED),
    "loading": (programs(lambda draws: Loading(draws).program()), SHARDED),
    "optimizing": (programs(lambda draws: Optimizing(draws).program()), SHARDED),
    "setting": (programs(lambda draws: Setting(draws).program()), SHARDED),
    "crossing": (programs(crossed), SHARDED),
    "layers": (programs(layers), SHARDED),
    "operating": (programs(operating), ("ddp", "exact")),
}


class Search:
    """A search in one family of programs, on ranks that live as long as the search does.

    of_each: with how many of the pairs of strategy and world size a program is tried, in turns. rows: whether the
    ranks have uneven shares of a batch.
    """

    def __init__(
        self,
        family: str,
        world_sizes: Sequence[int],
        strategies: Sequence[str] | None = None,
        of_each: int = 99,
        rows: bool = False,
    ) -> None:
        self.family, self.of_each = family, of_each
        self.strategy, names = FAMILIES[family]
        self.ranks = [Ranks(size, name, rows) for name in strategies or names for size in world_sizes]
        self.tried = self.made_small = 0
        self.faults: dict[tuple[Any, ...], tuple[Program, Difference]] = {}
        self.met: Counter[str] = Counter()  # programs that differed, by kind

    def __enter__(self) -> Search:
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self.ranks:
            ranks.close()

    def run(
        self,
        programs: int,
        seed: int,
        seconds: float = 1e9,
        most: int = 10,
        refused: bool = False,
        without: str = "",
    ) -> None:
        """Try drawn programs; make the first `most` that differ small, and print them.

        refused: those that are refused, too. without: leave statements out that contain this (a regular expression).
        """
        end = time.monotonic() + seconds
        without = "|".join(filter(None, [without, DIES_ON_CARDS * (DEVICE != "cpu")]))

        @seeded(seed)
        @settings(
            max_examples=programs,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.strategy)
        def try_all(program: Program) -> None:
            if time.monotonic() < end:
                self.tried += 1
                if without:
                    body = tuple(statement for statement in program.body if not re.search(without, statement))
                    program = replace(program, body=body)
                self.try_one(program, most, refused)

        try_all()

    def try_one(self, program: Program, most: int = 10, refused: bool = False) -> None:
        """Try one program on ranks."""
        expected = play_on_one_device(program)
        pairs = len(self.ranks)
        turns = [(self.tried * self.of_each + place) % pairs for place in range(min(self.of_each, pairs))]
        for ranks in map(self.ranks.__getitem__, turns):
            found = difference(program, ranks, expected)
            if found is None:
                continue
            self.met[found.kind] += 1
            if found.kind == "refused" and not refused:
                continue
            if self.made_small >= most:
                return
            self._keep(program, found, ranks)
            return

    def _keep(self, program: Program, found: Difference, ranks: Ranks) -> None:
        self.made_small += 1

        def fails(smaller: Program) -> bool:
            other = difference(smaller, ranks)
            return other is not None and other.kind == found.kind and _about(other) == _about(found)

        small = smallest(program, fails)
        shown = difference(small, ranks) or found
        key = (shown.kind, calls(small))
        if key not in self.faults:
            self.faults[key] = small, shown
            told = f"--- {self.family}, {shown.kind}, {shown.ranks}\n{script(small)}{_quoted(shown.text)}"
            print(told, flush=True)

    def report(self) -> str:
        """Return how many programs were tried, and how many differed."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.met.items())) or "none differ"
        return f"{self.family}: {self.tried} programs tried; {kinds}; {len(self.faults)} faults shown"


def _about(found: Difference) -> str:
    return found.text.split(":")[1].strip() if found.kind == "ended" else ""


def _quoted(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())
