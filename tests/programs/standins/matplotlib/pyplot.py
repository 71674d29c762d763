"""Draws nothing, and writes how often it was asked to."""

from __future__ import annotations

from typing import Any

_asked: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: _asked.append(name)


def savefig(path: str, **_: Any) -> None:
    with open(path, "w") as file:
        file.write("\n".join(_asked))
