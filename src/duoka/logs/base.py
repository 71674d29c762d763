"""The interface of a log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from duoka.errors import OptionError

Value = float | int | str


class Log(ABC):
    """A destination for numbers and texts, by name.

    Constructed with the text after the colon; `close` is always called.
    """

    @abstractmethod
    def write(self, step: int | None, values: dict[str, Value]) -> None:
        """Write one row. `step` is None if the script gave none."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Close the log. failed: the run ended with an error."""


def library(name: str, package: str, extra: str) -> Any:
    """Import an optional dependency.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        hint = f"pip install {package}, or pip install 'duoka[{extra}]'"
        raise OptionError("log", extra, f"used where {package} is installed", hint) from error
