"""`manifest.json`, the table of contents of a checkpoint: written last, and read first.

    {
      "format": 1,
      "step": 1200, "epoch": 3,            steps done, epochs finished
      "metric": 0.93,                      or null
      "states": {"model": {"kind": "model", "files": ["model.safetensors"]}, …},
      "files": {"model.safetensors": {"size": …, "sha256": "…"}, …},
      "made": {"duoka": …, "torch": …, "python": …, "world_size": 2, "time": …},
      "sha256": "…"                        of this text with "" as the value
    }

The text has exactly one form, so any change of a manifest is detected.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.errors import CheckpointDamaged, CheckpointError

FORMAT = 1
NAME = "manifest.json"
INDEX = ".index.json"  # suffix of a file that maps tensors to files
TREES = "states.json"  # the parts of all states that are not tensors
LARGEST = 64 << 20  # maximum bytes read of a manifest
_DIRECTORY = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PIECE = 1 << 20
_OFTEN = 1 << 10  # pieces between two signs of life


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint. size: bytes."""

    size: int
    sha256: str


@dataclass(frozen=True)
class StateEntry:
    """A saved state. kind: model, optimizer, object, tensor, container or value."""

    kind: str
    files: tuple[str, ...]

    @property
    def is_in_parts(self) -> bool:
        """True if its tensors are in several files with an index (`parts.py`)."""
        return any(file.endswith(INDEX) for file in self.files)


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint. made: versions and time, for information."""

    step: int
    epoch: int
    states: Mapping[str, StateEntry]
    files: Mapping[str, FileEntry]
    made: Mapping[str, Any]
    metric: float | None = None

    def text(self) -> bytes:
        """Return the contents of the file."""
        return _text({"format": FORMAT, **asdict(self)})


def _text(content: Mapping[str, Any]) -> bytes:
    def render(digest: str) -> bytes:
        return (json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()

    return render(hashlib.sha256(render("")).hexdigest())


def read(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises CheckpointDamaged if it is missing or changed."""
    path = directory / NAME
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST)
        content = json.loads(text)
        if content["format"] != FORMAT and text == _text(content):
            raise CheckpointError(
                f"{directory} has format {content['format']}; this version of duoka reads format {FORMAT}"
            )
        if text != _text(content):
            raise CheckpointDamaged(f"{path} is damaged: its own checksum is wrong")
        return _manifest(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, FileNotFoundError):
            raise CheckpointDamaged(f"{directory} has no {NAME}") from error
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from error


def _manifest(content: Mapping[str, Any]) -> Manifest:
    states = {name: StateEntry(state["kind"], tuple(state["files"])) for name, state in content["states"].items()}
    files = {name: FileEntry(entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
    wrong = [name for name in files if Path(name).name != name]
    wrong += [name for state in states.values() for name in state.files if name not in files]
    if wrong:
        raise ValueError(f"it names {wrong[0]!r}")
    return Manifest(content["step"], content["epoch"], states, files, content["made"], content["metric"])


def check(directory: Path, manifest: Manifest, names: tuple[str, ...] | None = None) -> None:
    """Compare files with the manifest, all or those named. Raises CheckpointDamaged with the names of wrong ones."""
    wanted = manifest.files if names is None else {name: manifest.files[name] for name in names}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        found = (pool.map if len(wanted) > 1 else map)(lambda name: _fault(directory / name, wanted[name]), wanted)
        faults = [fault for fault in found if fault]
    if faults:
        raise CheckpointDamaged("; ".join(faults))


def _fault(path: Path, entry: FileEntry) -> str:
    """Return a description of the damage of a file, or ""."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path} has {size} bytes, and should have {entry.size}"
        return "" if digest(path) == entry.sha256 else f"{path} is damaged: its SHA-256 is wrong"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"


def digest(path: Path, alive: Callable[[], object] = lambda: None) -> str:
    """Return the SHA-256 of a file in hexadecimal. alive: called now and then."""
    found = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        for number in itertools.count(1):
            if not (count := file.readinto(piece)):
                break
            found.update(piece[:count])
            if number % _OFTEN == 0:
                alive()
    return found.hexdigest()


def directory_name(step: int, again: int = 0) -> str:
    """Return the directory name of a step. again: number of existing directories of this step."""
    return f"step-{step:08}" + (f".{again}" if again else "")


def directories(root: Path) -> list[Path]:
    """Return the directories of all steps, also damaged ones, the oldest first."""
    found = []
    for entry in root.iterdir() if root.is_dir() else ():
        name = _DIRECTORY.fullmatch(entry.name)
        if name and entry.is_dir():
            found.append(((int(name[1]), int(name[2] or 0)), entry))
    return [entry for _, entry in sorted(found)]


def is_number(value: object) -> bool:
    """Return True for a number that can be a metric."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
