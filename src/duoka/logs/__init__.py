"""Where `run.log` writes: one file for each kind, by name.

`LOGS` is the table. A kind may be followed by a colon and a place: "csv:out/train.csv", "wandb:my-project".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from duoka.errors import OptionError
from duoka.logs.base import Log
from duoka.logs.values import check_step, check_values, number_of
from duoka.options import one_of

__all__ = ["Log", "Logs", "check_logs", "check_step", "check_values", "open_logs"]

# name -> (module, class, what follows the colon; "" if nothing has to)
LOGS = {
    "console": ("duoka.logs.console", "Console", ""),
    "csv": ("duoka.logs.csv", "Csv", "csv:out/train.csv"),
    "jsonl": ("duoka.logs.jsonl", "JsonLines", "jsonl:out/train.jsonl"),
    "mlflow": ("duoka.logs.mlflow", "Mlflow", ""),
    "tensorboard": ("duoka.logs.tensorboard", "TensorBoard", "tensorboard:out/tensorboard"),
    "wandb": ("duoka.logs.wandb", "Wandb", ""),
}


class Logs:
    """All logs of a run. On ranks other than 0 there is none."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)

    def write(self, step: int | None, values: dict[str, Any]) -> None:
        """Write numbers, tensors of one element, or texts.

        Raises:
            OptionError: something else is given.
        """
        if not self._logs:
            return
        plain = {name: number_of(name, value) for name, value in values.items()}
        for log in self._logs:
            log.write(step, plain)

    def close(self, failed: bool) -> None:
        """Close all of them, also where one cannot be; the first error is raised at the end."""
        logs, self._logs = self._logs, []
        errors = []
        for log in logs:
            try:
                log.close(failed)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def check_logs(names: str | Sequence[str]) -> list[tuple[str, str]]:
    """Names, and what follows the colon.

    Raises:
        OptionError: there is no such log, or it needs a place.
    """
    found = []
    for word in [names] if isinstance(names, str) else names:
        name, _, place = str(word).partition(":")
        one_of("log", name, LOGS)
        example = LOGS[name][2]
        if example and not place:
            raise OptionError("log", word, "followed by a place", f"for example: {example}")
        found.append((name, place))
    return found


def open_logs(names: Iterable[tuple[str, str]]) -> Logs:
    """Open logs, in their order. Raises OptionError where one cannot be."""
    opened: list[Log] = []
    try:
        for name, place in names:
            module, kind, _ = LOGS[name]
            opened.append(getattr(import_module(module), kind)(place))
    except BaseException:
        Logs(opened).close(failed=True)
        raise
    return Logs(opened)
