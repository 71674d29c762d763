"""Count the operations that every rank computed whole, and their share of the run's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from duoka.system.user_code import user_line

WORTH_A_WORD = 0.05  # share of the time

Place = tuple[str, str]  # an operation and a line of the script


class Tally(Counter[Place]):
    """Number of calls by operation and line; `seconds` likewise, without synchronizing a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated = 0  # further calls, of rows that had been gathered before
        self.seconds: Counter[Place] = Counter()
        self._began = perf_counter()

    def begin(self) -> None:
        """Start measuring the run's time; called with the first batch."""
        self._began = perf_counter()

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Count and time an operation that is computed whole."""
        key = operation, user_line()
        self[key] += 1
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[key] += perf_counter() - start  # type: ignore[assignment]

    def shares(self) -> dict[Place, float]:
        """Return each operation's share of the time since the first batch, the largest first."""
        seconds_so_far = max(perf_counter() - self._began, 1e-9)
        return {key: seconds / seconds_so_far for key, seconds in self.seconds.most_common()}

    def lines(self) -> list[str]:
        """Return a line for each operation and place, the costliest first."""
        return [
            f"computed whole by every rank: {operation} at {line}, {_times(self[operation, line])}, "
            f"{share:.1%} of the time"
            for (operation, line), share in self.shares().items()
        ]

    def warning(self) -> str | None:
        """Return one line if the total exceeds WORTH_A_WORD of the time, else None."""
        shares = self.shares()
        total = sum(shares.values())
        if total <= WORTH_A_WORD:
            return None
        operation, line = next(iter(shares))
        return (
            f"{total:.0%} of the time went into operations that every rank computes whole, most of it "
            f"into {operation} at {line}; --verbose lists all of them"
        )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
