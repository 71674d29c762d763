"""What a log is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from duoka.errors import OptionError

Value = float | int | str


class Log(ABC):
    """Takes numbers and texts, by name. Made with the place that follows its name; opened once, always closed."""

    @abstractmethod
    def write(self, step: int | None, values: dict[str, Value]) -> None:
        """Write one row."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End it. failed: the run ended by an error."""


def library(name: str, package: str, extra: str) -> Any:
    """A library that is an extra of duoka's.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        hint = f"pip install {package}, or pip install 'duoka[{extra}]'"
        raise OptionError("log", extra, f"used where {package} is installed", hint) from error
