"""A checkpoint in memory, and the thread that writes it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from duoka.checkpoint import disk, manifest
from duoka.checkpoint.image import Image, lay_out
from duoka.checkpoint.manifest import TREES, FileEntry, Manifest, StateEntry
from duoka.checkpoint.states import OWN_FILE, SavedState
from duoka.errors import CheckpointError

TENSORS = "states.safetensors"


class Snapshot:
    """A checkpoint in memory. states: its states. files: the bytes of each file.

    Models and optimizers have a file each for their tensors; all else is in `states.json` and `states.safetensors`.
    images: of the previous save, by file; their memory is reused, as page faults are most of the cost of a copy.
    """

    def __init__(self, taken: Mapping[str, SavedState], images: dict[str, Image]) -> None:
        self._images = images
        self.states: dict[str, StateEntry] = {}
        self.files: dict[str, Sequence[disk.Data]] = {}
        trees: dict[str, Any] = {}
        small: dict[str, Tensor] = {}
        for name, part in taken.items():
            files = []
            if part.kind == "model" or (part.kind in OWN_FILE and part.tensors):
                files.append(f"{name}.safetensors")
                self._copy(files[0], part.tensors)
            elif part.tensors:
                files.append(TENSORS)
                small.update(part.tensors)
            if part.has_tree:
                files.append(TREES)
                trees[name] = part.tree
            self.states[name] = StateEntry(part.kind, tuple(files))
        if small:
            self._copy(TENSORS, small)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tree)}" for name, tree in trees.items())
        self.files[TREES] = (f"{{\n{lines}\n}}\n".encode(),)

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        layout = lay_out(tensors, {})
        image = self._images.get(file)
        if image is None or image.size < layout.size:
            image = self._images[file] = Image(layout)
        image.copy_from(tensors, layout)
        self.files[file] = image.parts()


def write(root: Path, snapshot: Snapshot, about: Manifest) -> Path:
    """Write a checkpoint's directory atomically.

    Raises:
        CheckpointError: writing failed, for example because the disk is full.
    """
    try:
        final = _free(root, about.step)
        beside = disk.partial(final)
        os.mkdir(beside)
        try:
            entries = _write_files(beside, snapshot.files)
            text = replace(about, states=snapshot.states, files=entries).text()
            disk.write(beside / manifest.NAME, (text,))
            disk.sync(beside)
            os.rename(beside, final)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        disk.sync(root)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {about.step} could not be written into {root}: {error}; those written before "
            "are as they were"
        ) from error
    return final


def _write_files(directory: Path, files: Mapping[str, Sequence[disk.Data]]) -> dict[str, FileEntry]:
    """Write all files, while threads compute their digests."""
    digests = {name: Digest(parts) for name, parts in files.items()}
    for name, parts in files.items():
        disk.write(directory / name, parts)
    return {name: FileEntry(sum(map(len, parts)), digests[name].wait()) for name, parts in files.items()}


class Digest:
    """The SHA-256 of a file's bytes, computed in a thread; at once if no thread can be started."""

    def __init__(self, parts: Sequence[disk.Data]) -> None:
        self._digest = hashlib.sha256()
        self._thread = threading.Thread(target=self._run, args=(parts,), name="duoka-digest")
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down, and waits for this thread
            self._run(parts)

    def _run(self, parts: Sequence[disk.Data]) -> None:
        for part in parts:
            self._digest.update(part)

    def wait(self) -> str:
        """Return the digest in hexadecimal."""
        if self._thread.ident is not None:
            self._thread.join()
        return self._digest.hexdigest()


def _free(root: Path, step: int) -> Path:
    again = 0
    while (path := root / manifest.directory_name(step, again)).exists():
        again += 1
    return path


class BackgroundTask:
    """Runs one task at a time in a thread that the process joins at exit.

    Errors are raised by `finish` or `pop_error`; errors that nobody read are printed at exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []
        weakref.finalize(self, _say, self._failures)

    def start(self, work: Callable[[], Any]) -> None:
        """Start a task; none may be running."""
        assert self._thread is None
        self._thread = threading.Thread(target=_run, args=(work, self._failures), name="duoka-checkpoint")
        self._thread.start()

    def pop_error(self) -> BaseException | None:
        """Return an error of the last task, once."""
        return self._failures.pop() if self._failures else None

    def finish(self) -> None:
        """Wait for the running task."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _run(work: Callable[[], Any], failures: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failures.append(error)


def _say(failures: list[BaseException]) -> None:
    for failure in failures:
        print(f"duoka: error: {failure}", file=sys.stderr)


def prune(root: Path, keep: int | None, best: str | None) -> None:
    """Remove all but the last `keep` checkpoints and the one with the best metric ("max" or "min").

    Raises:
        CheckpointError: one cannot be removed.
    """
    every = manifest.directories(root)
    if keep is None or len(every) <= keep:
        return
    kept = {*every[-keep:], *([found] if best and (found := find_best(every, best)) else [])}
    for directory in every:
        if directory not in kept:
            try:
                disk.remove(directory)
            except OSError as error:
                raise CheckpointError(f"the old checkpoint {directory} could not be removed: {error}") from error


def find_best(directories: Sequence[Path], best: str) -> Path | None:
    """Return the directory with the best metric, the newest if several; None if there is no metric."""
    scores = []
    for number, directory in enumerate(directories):
        try:
            metric = manifest.read(directory).metric
        except CheckpointError:
            continue
        if metric is not None:
            scores.append((metric if best == "max" else -metric, number))
    return directories[max(scores)[1]] if scores else None
