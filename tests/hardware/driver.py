"""A fake of the driver's library, `libnvidia-ml.so.1`, used by the real nvidia-ml-py.

A recording is a JSON file: answers by the name of the C function, of the whole machine and of each GPU. An answer
`{"error": 15}` is returned as that number. A function that is not recorded does not exist in this driver.
`"library": null` is a machine without the library. `"hangs": name` is a function that does not return. Answers go
through nvidia-ml-py's own structures, error classes and conversions.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    import pytest

RECORDINGS = Path(__file__).parent / "recordings"


def play(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Replace the driver by a fake with the answers of one recording; returns the recording."""
    recording: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text())
    put(monkeypatch, recording)
    return recording


def put(monkeypatch: pytest.MonkeyPatch, recording: dict[str, Any]) -> Driver | None:
    """Replace the driver by a fake with a given recording, which may be changed later; returns the fake."""
    driver = None if recording.get("library", ...) is None else Driver(recording)
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", _not_there)
    return driver


def _not_there(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


class Driver:
    """Functions are found by name, as by ctypes. recording: may be a function. asked: the names called."""

    def __init__(self, recording: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        self._recording = recording
        self.asked: list[str] = []
        self.over = threading.Event()

    @property
    def recording(self) -> dict[str, Any]:
        return self._recording() if callable(self._recording) else self._recording

    @property
    def cards(self) -> list[dict[str, Any]]:
        return self.recording.get("cards", [])  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Callable[..., int]:
        own = {
            "nvmlInitWithFlags": lambda *_: _code(self.recording.get("nvmlInitWithFlags")),
            "nvmlShutdown": lambda *_: 0,
            "nvmlDeviceGetCount_v2": lambda count: _fill([count], len(self.cards)),
            "nvmlDeviceGetHandleByIndex_v2": self._card,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._part,
        }
        system = self.recording.get("system", {})
        if name in own:
            function: Callable[..., int] = own[name]
        elif name in system:
            function = lambda *out: _fill(list(out), system[name])  # noqa: E731
        elif any(name in known for card in self.cards for known in (card, *filter(None, card.get("parts", [])))):
            function = lambda handle, *out: self._of_card(name, handle, list(out))  # noqa: E731
        else:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.asked.append(name)
            if self.recording.get("hangs") == name:
                self.over.wait(60)
            return function(*args)

        return call

    def _card(self, index: Any, out: Any) -> int:
        card = self.cards[index.value]
        if "nvmlDeviceGetHandleByIndex_v2" in card:
            return _code(card["nvmlDeviceGetHandleByIndex_v2"])
        return _point(out, 1 + 100 * index.value)

    def _part(self, handle: Any, index: Any, out: Any) -> int:
        address = _address(handle)
        parts = self._at(address).get("parts", [])
        there = index.value < len(parts) and parts[index.value] is not None
        return _point(out, address + 1 + index.value) if there else pynvml.NVML_ERROR_NOT_FOUND

    def _at(self, address: int) -> dict[str, Any]:
        card, part = divmod(address - 1, 100)
        return self.cards[card] if part == 0 else self.cards[card]["parts"][part - 1]  # type: ignore[no-any-return]

    def _of_card(self, name: str, handle: Any, out: list[Any]) -> int:
        answers = self._at(_address(handle))
        if name not in answers:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        answer = answers[name]
        if name == "nvmlDeviceGetNvLinkState" and isinstance(answer, list):
            if out[0] >= len(answer):
                return pynvml.NVML_ERROR_INVALID_ARGUMENT
            answer = answer[out[0]]
        if "RunningProcesses" in name and isinstance(answer, list):
            return _fill_processes(*out, answer)
        return _fill(out, answer)


def _code(answer: Any) -> int:
    return answer["error"] if isinstance(answer, dict) else 0


def _address(handle: Any) -> int:
    return ctypes.c_void_p.from_buffer(handle).value or 0


def _point(out: Any, address: int) -> int:
    ctypes.c_void_p.from_buffer(out._obj).value = address
    return 0


def _fill(out: list[Any], answer: Any) -> int:
    """Write an answer to the caller's memory: a text, a structure, a number, or several."""
    if isinstance(answer, dict) and "error" in answer:
        return answer["error"]  # type: ignore[no-any-return]
    places = [place._obj for place in out if hasattr(place, "_obj")]
    if isinstance(answer, str):
        out[0].value = answer.encode()
    elif isinstance(answer, dict):
        for field, value in answer.items():
            setattr(places[0], field, value)
    else:
        for place, value in zip(places, answer if isinstance(answer, list) else [answer], strict=True):
            place.value = value
    return 0


def _fill_processes(count: Any, array: Any, found: list[dict[str, Any]]) -> int:
    room, count._obj.value = count._obj.value, len(found)
    if len(found) > (room if array is not None else 0):
        return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    for place, one in enumerate(found):
        memory = one.get("usedGpuMemory")
        array[place].pid = one["pid"]
        array[place].usedGpuMemory = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value if memory is None else memory
        array[place].gpuInstanceId = one.get("gpuInstanceId", 0xFFFFFFFF)  # as the driver says "none"
        array[place].computeInstanceId = one.get("computeInstanceId", 0xFFFFFFFF)
    return 0
