"""`console`: one line for each row on standard output."""

from __future__ import annotations

from duoka.logs.base import Log, Value


class Console(Log):
    """`step 100: loss 0.3421, accuracy 0.9012`."""

    def __init__(self, place: str) -> None:
        pass

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        print(line(step, values), flush=True)

    def close(self, failed: bool) -> None:
        pass


def line(step: int | None, values: dict[str, Value]) -> str:
    """Format a row as text."""
    words = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
    return words if step is None else f"step {step}: {words}"
