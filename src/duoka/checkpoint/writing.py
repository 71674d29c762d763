"""A checkpoint in memory, and the thread that writes it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from duoka.checkpoint import disk, drafts, gathering, manifest, marks, parts
from duoka.checkpoint.image import Image, Layout, lay_out
from duoka.checkpoint.manifest import TREES, FileEntry, Manifest, StateEntry
from duoka.checkpoint.states import OWN_FILE, SavedState
from duoka.errors import CheckpointError
from duoka.view.collectives.base import Collectives

TENSORS = "states.safetensors"
ALIGNED = 16  # bytes: rows in memory may be viewed as their type


class Snapshot:
    """A checkpoint in memory. states: its states. files: the bytes of each file.

    Models and optimizers have a file each for their tensors; all else is in `states.json` and `states.safetensors`.
    images: of the previous save, by file; their memory is reused, as page faults are most of the cost of a copy.
    rank: ranks other than 0 only write states in parts (`parts.py`). shares: the ranks share files, so that each
    writes its own rows of all tensors; else each gathers whole tensors for files of its own.

    Attributes:
        rows: what this rank writes into files of all ranks. own: those of them whose digests it computes.
        others: ranks that write into these files, too.
    """

    def __init__(
        self, taken: Mapping[str, SavedState], images: dict[str, Image], rank: int = 0, shares: bool = False
    ) -> None:
        self._images, self._shares = images, shares
        self.states: dict[str, StateEntry] = {}
        self.files: dict[str, Sequence[disk.Data]] = {}
        self.rows: dict[str, list[tuple[int, disk.Data]]] = {}
        self.own: dict[str, int] = {}
        self.others: set[int] = set()
        trees: dict[str, Any] = {}
        small: dict[str, Tensor] = {}
        for name, part in taken.items():
            files: list[str] = []
            if part.holders is not None:
                files += self._copy_part(name, part.tensors, part.holders)
            elif rank:
                continue
            elif part.kind == "model" or (part.kind in OWN_FILE and part.tensors):
                files.append(f"{name}.safetensors")
                self._copy(files[0], part.tensors)
            elif part.tensors:
                files.append(TENSORS)
                small.update(part.tensors)
            if part.has_tree:
                files.append(TREES)
                trees[name] = part.tree
            self.states[name] = StateEntry(part.kind, tuple(files))
        if rank:
            return
        if small:
            self._copy(TENSORS, small)
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tree)}" for name, tree in trees.items())
        self.files[TREES] = (f"{{\n{lines}\n}}\n".encode(),)

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        layout = lay_out(tensors, {})
        image = self._image(file, layout)
        image.copy_from(tensors, layout)
        self.files[file] = image.parts()

    def _image(self, file: str, layout: Layout) -> Image:
        image = self._images.get(file)
        if image is None or image.size < layout.size:
            image = self._images[file] = Image(layout)
        image.layout = layout
        return image

    def _copy_part(self, name: str, tensors: Mapping[str, Tensor], holders: Collectives) -> list[str]:
        """Copy this rank's tensors of a state in parts; returns the state's files, of all ranks."""
        count, rank = holders.world_size, holders.rank
        assigned = parts.assign(tensors, count)
        files, index = parts.file_names(name, count), parts.index_name(name)
        # transformers requires the entry. All ranks lay out all, so that all find what safetensors cannot hold.
        layouts = [lay_out({key: tensors[key] for key in names}, {"format": "pt"}) for names in assigned]
        writes = parts.are_first(holders)
        if not self._shares:
            stream = gathering.gathered(tensors, assigned, rank)
            image = self._image(files[rank], layouts[rank]) if writes else None
            for key, tensor in stream:
                if image is not None:
                    image.put(key, tensor)
                del tensor  # before the next one comes
            if image is not None:
                self.files[files[rank]] = image.parts()
        elif writes:
            self._copy_rows(files, layouts, tensors, rank)
            self.others |= {*holders.members} - {holders.members[rank]}
        if not writes:
            return []
        if rank == 0:
            self.files[index] = (parts.index_text(tensors, assigned, files),)
        return [index, *files]

    def _copy_rows(
        self, files: Sequence[str], layouts: Sequence[Layout], tensors: Mapping[str, Tensor], rank: int
    ) -> None:
        """Copy this rank's rows of all tensors, and plan where they go."""
        runs = {key: found for key, tensor in tensors.items() if (found := drafts.own_runs(tensor, rank == 0))}
        places: dict[str, int] = {}
        size = 0
        for key, found in runs.items():
            places[key] = size
            size += -(-sum(run.size for run in found) // ALIGNED) * ALIGNED
        image = self._image(files[rank], Layout(b"", places, size))
        image.copy_from({key: drafts.own_rows(tensors[key]) for key in runs}, image.layout)
        memory = memoryview(image.parts()[1])
        for number, (file, layout) in enumerate(zip(files, layouts, strict=True)):
            begin = len(layout.header)
            self.rows[file] = [(0, layout.header)] if number == rank else []
            for key, place in layout.places.items():
                for run in runs.get(key, ()):
                    start = places[key] + run.start
                    self.rows[file].append((begin + place + run.at, memory[start : start + run.size]))
        self.own[files[rank]] = len(layouts[rank].header) + layouts[rank].size


def begin(root: Path, step: int) -> Path:
    """Make the directory into which all ranks write a checkpoint before it gets its name.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        beside = disk.partial(_free(root, step))
        os.mkdir(beside)
        return beside
    except OSError as error:
        raise CheckpointError(f"the checkpoint of step {step} could not be written into {root}: {error}") from error


def write(
    root: Path, snapshot: Snapshot, about: Manifest, beside: Path | None = None, others: Collection[int] = ()
) -> Path:
    """Write a checkpoint's directory atomically.

    beside: the directory that `begin` made, if other ranks write into it, too; None creates one. others: these ranks,
    for whose files this function waits.

    Raises:
        CheckpointError: writing failed, for example because the disk is full.
    """
    try:
        final = _free(root, about.step)
        if beside is None:
            beside = disk.partial(final)
            os.mkdir(beside)
        try:
            entries = _write_files(beside, snapshot.files)
            entries |= _write_rows(beside, snapshot, 0)
            entries |= marks.wait_for(beside, others)
            text = replace(about, states=snapshot.states, files=entries).text()
            disk.write(beside / manifest.NAME, (text,))
            disk.sync(beside)
            os.rename(beside, final)
        except BaseException:
            with suppress(OSError):
                disk.remove(beside)
            raise
        disk.sync(root)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {about.step} could not be written into {root}: {error}; earlier ones are "
            "unchanged"
        ) from error
    return final


def write_part(beside: Path, snapshot: Snapshot, rank: int) -> None:
    """Write the files of a rank other than 0 into the directory that `begin` made.

    Raises:
        CheckpointError: they cannot be written. Rank 0 raises it, too.
    """
    try:
        entries = _write_files(beside, snapshot.files)
        try:
            entries |= _write_rows(beside, snapshot, rank)
        except CheckpointError:  # of another rank, as rank 0 reports
            return
        marks.report(beside, rank, entries)
    except OSError as error:
        if not beside.exists():  # another rank has given up, and reports the reason
            return
        marks.give_up(beside, rank, str(error))
        raise CheckpointError(
            f"rank {rank} could not write its part of the checkpoint into {beside.parent}: {error}; earlier "
            "ones are unchanged"
        ) from error


def _write_files(directory: Path, files: Mapping[str, Sequence[disk.Data]]) -> dict[str, FileEntry]:
    """Write all files, while threads compute their digests."""
    digests = {name: Digest(data) for name, data in files.items()}
    for name, data in files.items():
        disk.write(directory / name, data)
    return {name: FileEntry(sum(map(len, data)), digests[name].wait()) for name, data in files.items()}


def _write_rows(beside: Path, snapshot: Snapshot, rank: int) -> dict[str, FileEntry]:
    """Write this rank's rows into the files of all ranks, wait for theirs, and compute the digests of its own files.

    Raises:
        CheckpointError: another rank could not write its rows.
    """
    if not snapshot.rows:
        return {}
    for file, size in snapshot.own.items():
        disk.reserve(beside / file, size)
    for file in sorted(snapshot.rows, key=lambda file: file not in snapshot.own):  # writes to one file wait in turn
        disk.write_at(beside / file, snapshot.rows[file])
    marks.say_written(beside, rank)
    marks.wait_for_rows(beside, snapshot.others)
    alive = partial(marks.say_written, beside, rank)
    return {file: FileEntry(size, manifest.digest(beside / file, alive)) for file, size in snapshot.own.items()}


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
