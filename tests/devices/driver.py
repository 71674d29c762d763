"""A stand-in for nvidia-ml-py that plays back answers in the shape in which a driver gives them.

A recording is a JSON file: answers of the whole machine, and for each card answers by the name of the question.
An answer `{"error": 15}` is raised as the library raises that number; a question that is not recorded is one
that this driver does not know.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

RECORDINGS = Path(__file__).parent / "recordings"


def play(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Put the stand-in in place of the library, with the answers of one recording; returns the recording."""
    recording: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    monkeypatch.setitem(sys.modules, "pynvml", driver(recording))
    return recording


def driver(recording: dict[str, Any]) -> ModuleType:
    """The library, with every question answered from `recording`."""
    module = ModuleType("pynvml")
    for name in dir(pynvml):
        if name.startswith(("NVMLError", "NVML_")):
            setattr(module, name, getattr(pynvml, name))
    cards, system = recording.get("cards", []), recording.get("system", {})

    def of_system(name: str) -> Any:
        return lambda: _answer(system[name]) if name in system else _unknown()

    def of_card(name: str) -> Any:
        return lambda card, *args: _answer(card[name]) if name in card else _unknown()

    for name in dir(pynvml):
        if name.startswith("nvmlSystem"):
            setattr(module, name, of_system(name))
        elif name.startswith("nvmlDevice"):
            setattr(module, name, of_card(name))

    def part(card: dict[str, Any], place: int) -> Any:
        parts = card.get("parts", [])
        return parts[place] if place < len(parts) and parts[place] else _answer({"error": 6})

    def handle(index: int) -> Any:
        return _answer(cards[index].get("nvmlDeviceGetHandleByIndex", cards[index]))

    made = {
        "nvmlInit": lambda: _answer(recording.get("nvmlInit")),
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: _answer(
            cards[index].get("nvmlDeviceGetHandleByIndex", cards[index])
        ),
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
    }
    for name, function in made.items():
        setattr(module, name, function)
    return module


def _answer(recorded: Any) -> Any:
    if isinstance(recorded, dict) and "error" in recorded:
        raise pynvml.NVMLError(recorded["error"])
    if isinstance(recorded, dict) and not any(key.startswith("nvml") for key in recorded):
        return SimpleNamespace(**recorded)
    if isinstance(recorded, list) and recorded and isinstance(recorded[0], dict):
        return [SimpleNamespace(**one) for one in recorded]
    return recorded


def _unknown() -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
