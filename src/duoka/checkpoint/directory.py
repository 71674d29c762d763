"""The directory of a run, and those of its checkpoints: names, manifests, digests, the lock.

`manifest.json`, the table of contents of a checkpoint, is written last, and read first:

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

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import socket
import stat
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from duoka.system import disk

FORMAT = 1
MANIFEST = "manifest.json"
INDEX = ".index.json"  # suffix of a file that maps tensors to files
TREES = "states.json"  # the parts of all states that are not tensors
LOCK = ".lock"
OWN_FILE = ("model", "optimizer")  # kinds of states whose tensors have a file of their own
LARGEST = 64 << 20  # maximum bytes read of a manifest: a damaged or strange file may be of any size
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


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
    path = directory / MANIFEST
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST)
        content = json.loads(text)
        if text != _text(content):
            raise CheckpointDamaged(f"{path} is damaged: its own checksum is wrong")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{directory} has format {content['format']}; this version of duoka reads format {FORMAT}"
            )
        states = {name: StateEntry(state["kind"], tuple(state["files"])) for name, state in content["states"].items()}
        files = {name: FileEntry(file["size"], file["sha256"]) for name, file in content["files"].items()}
        wrong = [name for name in files if Path(name).name != name]  # "../x" would lead out of it
        wrong += [name for state in states.values() for name in state.files if name not in files]
        if wrong:
            raise ValueError(f"it names {wrong[0]!r}")
        return Manifest(content["step"], content["epoch"], states, files, content["made"], content["metric"])
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{directory} has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from error


def is_number(value: object) -> bool:
    """Return True for a number that can be a metric."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


# The files of a checkpoint.


def check(directory: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Compare files with the manifest. Raises CheckpointDamaged with the names of wrong ones."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        faults = (pool.map if len(names) > 1 else map)(
            lambda name: _fault(directory / name, manifest.files[name]), names
        )
        damage = "; ".join(filter(None, faults))
    if damage:
        raise CheckpointDamaged(damage)


def _fault(path: Path, entry: FileEntry) -> str:
    """Describe the damage of a file, or return ""."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{path} has {size} bytes, and should have {entry.size}"
        digest = hashlib.sha256()
        for block in blocks_of(path):
            digest.update(block)
        return "" if digest.hexdigest() == entry.sha256 else f"{path} is damaged: its SHA-256 is wrong"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"


def blocks_of(path: Path) -> Iterator[memoryview]:
    """Yield the contents of a file in blocks, each in the same memory."""
    block = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            yield block[:count]


def read_trees(directory: Path) -> dict[str, Any]:
    """Read the JSON of each state that is more than tensors, by name."""
    path = directory / TREES
    try:
        trees = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(trees, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return trees


# The checkpoints of a run.


def steps(root: Path) -> list[Path]:
    """Return the directories of all steps, also damaged ones, the oldest first."""
    numbered = []
    for entry in root.iterdir() if root.is_dir() else ():
        name = _STEP.fullmatch(entry.name)
        if name and entry.is_dir():
            numbered.append(((int(name[1]), int(name[2] or 0)), entry))
    return [entry for _, entry in sorted(numbered)]


def free_name(root: Path, step: int) -> Path:
    """Return a name for a checkpoint that no directory has."""
    path, again = root / f"step-{step:08}", 0
    while path.exists():
        again += 1
        path = root / f"step-{step:08}.{again}"
    return path


def prune(root: Path, keep: int | None, best: str | None) -> None:
    """Remove all but the last `keep` checkpoints and the one with the best metric ("max" or "min").

    Raises CheckpointError if one cannot be removed.
    """
    directories = steps(root)
    if keep is None or len(directories) <= keep:
        return
    kept = {*directories[-keep:], find_best(directories, best) if best else None}
    for directory in directories:
        if directory not in kept:
            try:
                disk.remove(directory)
            except OSError as error:
                raise CheckpointError(f"the old checkpoint {directory} could not be removed: {error}") from error


def find_best(directories: Sequence[Path], best: str) -> Path | None:
    """Return the directory with the best metric, the newest if several; None if there is no metric."""
    scores = []
    for number, directory in enumerate(directories):
        with suppress(CheckpointError):
            metric = read(directory).metric
            if metric is not None:
                scores.append((metric if best == "max" else -metric, number))
    return directories[max(scores)[1]] if scores else None


class Lock:
    """A file lock on the directory of a run, held until `release`, garbage collection, or the end of the process.

    Raises CheckpointBusy if another run holds it, CheckpointError if the file is a link, or not a file of this user.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / LOCK
        planted = CheckpointError(
            f"{path} must be a plain file of your own, and is not; remove it, or name another directory"
        )
        try:  # in a directory that others may write to: not through a link, and a device must not block
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise planted from None
            raise
        try:
            status = os.fstat(fd)
            owners = (os.getuid(), directory.stat().st_uid)  # a file server may assign both to another user
            # The file is overwritten below: with a second (hard) link, that would be another file of this user.
            if not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid in owners):
                raise planted
            self._take(fd, directory)
        except BaseException:  # also a disk that is full
            os.close(fd)
            raise
        self._close = weakref.finalize(self, os.close, fd)
        # A child process that outlives this one (a loader's worker) must not keep the lock.
        os.register_at_fork(after_in_child=self._close)

    def _take(self, fd: int, directory: Path) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            raise CheckpointBusy(
                f"{directory} is being written by another run{f' ({holder})' if holder else ''}; "
                "end that one, or give this one another directory"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        self._close()
