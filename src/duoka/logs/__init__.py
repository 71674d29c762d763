"""Destinations of `run.log`: one module for each kind, looked up by name in `LOGS`.

A kind may be followed by a colon and a path or name: "csv:out/train.csv", "wandb:my-project".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from duoka.errors import OptionError
from duoka.logs.base import Log
from duoka.logs.values import check_step, check_values, number_of
from duoka.options import one_of
from duoka.process import this_process

__all__ = ["Log", "Logs", "check_logs", "check_step", "check_values", "open_logs"]

# name -> (module, class, an example of the full word where a path is required, else "")
LOGS = {
    "console": ("duoka.logs.console", "Console", ""),
    "csv": ("duoka.logs.csv", "Csv", "csv:out/train.csv"),
    "jsonl": ("duoka.logs.jsonl", "JsonLines", "jsonl:out/train.jsonl"),
    "mlflow": ("duoka.logs.mlflow", "Mlflow", ""),
    "tensorboard": ("duoka.logs.tensorboard", "TensorBoard", "tensorboard:out/tensorboard"),
    "wandb": ("duoka.logs.wandb", "Wandb", ""),
}


class Logs:
    """All logs of a run. Empty on ranks other than 0."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._logs = list(logs)

    def write(self, step: int | None, values: dict[str, Any]) -> None:
        """Write one row of numbers, tensors of one element, or texts.

        Raises:
            OptionError: a value is of another type.
        """
        logged = this_process().logged
        if not self._logs:
            values = {} if logged is None else {name: one for name, one in values.items() if not _is_far(one)}
        plain = {name: number_of(name, value) for name, value in values.items()}
        if logged is not None:
            logged(step, plain)
        for log in self._logs:
            log.write(step, plain)

    def close(self, failed: bool) -> None:
        """Close all logs, even if one fails to close, then raise the first error."""
        logs, self._logs = self._logs, []
        errors = []
        for log in logs:
            try:
                log.close(failed)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _is_far(value: Any) -> bool:
    """Return whether reading a value makes the script wait for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def check_logs(names: str | Sequence[str]) -> list[tuple[str, str]]:
    """Split each word into a log's name and the text after the colon.

    Raises:
        OptionError: no log has this name, or the log needs a path and none is given.
    """
    found = []
    for word in [names] if isinstance(names, str) else names:
        name, _, place = str(word).partition(":")
        one_of("log", name, LOGS)
        example = LOGS[name][2]
        if example and not place:
            raise OptionError("log", word, "followed by a path", f"for example: {example}")
        found.append((name, place))
    return found


def open_logs(names: Iterable[tuple[str, str]]) -> Logs:
    """Open the logs in the order given. Raises OptionError if one cannot be opened; those already open are closed."""
    opened: list[Log] = []
    try:
        for name, place in names:
            module, kind, _ = LOGS[name]
            opened.append(getattr(import_module(module), kind)(place))
    except BaseException:
        Logs(opened).close(failed=True)
        raise
    return Logs(opened)
