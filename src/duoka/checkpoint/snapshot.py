"""A checkpoint in memory, and the thread of each rank that writes it.

States of which each rank holds rows are whole tensors in a file for each rank, about 1/W of all bytes:

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json          maps tensors to files, in Hugging Face's format

Each rank writes its own rows into all files; ranks that do not share files send each other the rows of the files that
they write (`sharded.py`). A rank other than 0 then leaves a mark `rank-1.json` in the directory, with the digests of
files that it has written alone, or with an error. Rank 0 waits for these marks, computes the digests of shared files,
writes the manifest, and gives the directory its name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint import directory, sharded
from duoka.checkpoint.directory import INDEX, OWN_FILE, TREES, FileEntry, Manifest, StateEntry
from duoka.checkpoint.formats import is_sharded
from duoka.checkpoint.formats.safetensors import lay_out
from duoka.checkpoint.saving import index_text, part_names
from duoka.checkpoint.sharded import Part
from duoka.checkpoint.states import SavedState
from duoka.errors import CheckpointError
from duoka.hardware.accelerator import has_streams, wait_for_copies
from duoka.system import disk

TENSORS = "states.safetensors"  # the tensors of all states without a file of their own
LARGE = 64 << 20  # bytes from which several threads copy
PATIENCE = 600.0  # seconds without a byte written by a rank for which rank 0 waits
_LOOK = 0.02  # seconds between two looks


class Memory:
    """Memory for a copy of tensors, kept for the next save: page faults are most of the cost of a copy.

    is_pinned: it is pinned, for copies from an accelerator.
    """

    def __init__(self, size: int, is_pinned: bool = False) -> None:
        self.size = size
        if is_pinned:
            self.bytes = torch.empty(max(size, 1), dtype=torch.uint8, device="cpu", pin_memory=True)
            return
        memory = mmap.mmap(-1, max(size, 1))  # no mapping is of 0 bytes
        with suppress(AttributeError, OSError, ValueError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, memoryview]:
        """Copy this rank's rows of tensors, on any devices, one after the other; return the bytes of each."""
        copies: dict[str, memoryview] = {}
        here: dict[int, Tensor] = {}  # by offset
        elsewhere: dict[int, Tensor] = {}
        memory, end = self.bytes.numpy().data, 0
        for name, tensor in tensors.items():
            rows = sharded.local_rows(tensor)
            begin, end = end, end + rows.nbytes
            copies[name] = memory[begin:end]
            if rows.numel():
                (here if rows.is_cpu else elsewhere)[begin] = rows
        for at, rows in elsewhere.items():  # these go on while the CPU copies what is `here`
            self.bytes[at : at + rows.nbytes].copy_(sharded.flat(rows), non_blocking=True)
        threads = min(4, torch.get_num_threads()) if self.size > LARGE else 1
        with ThreadPoolExecutor(threads, "duoka-copy") as pool:
            list((pool.map if threads > 1 else map)(self._move, here, here.values()))
        for device in {rows.device for rows in elsewhere.values()}:
            wait_for_copies(device)
        return copies

    def _move(self, at: int, rows: Tensor) -> None:  # faster than copy_, whose threads synchronize after each tensor
        data = sharded.flat(rows)
        ctypes.memmove(self.bytes.data_ptr() + at, data.data_ptr(), len(data))


class Snapshot:
    """A checkpoint in memory: what this rank writes of it.

    Models and optimizers have a file each for their tensors, or one for each rank that holds rows; all else is in
    `states.json` and `states.safetensors`, which rank 0 writes.
    """

    def __init__(
        self, states: Mapping[str, SavedState], memories: dict[str, Memory], rank: int, shares: bool
    ) -> None:
        """Copy the states. memories: of the previous save. shares: the ranks share files."""
        self._memories, self._rank, self._shares = memories, rank, shares
        self.states: dict[str, StateEntry] = {}  # of the manifest
        self.files: dict[str, list[Part]] = {}  # what this rank writes into each
        self.shared: dict[str, int] = {}  # sizes of files into which other ranks write, too
        self.others: set[int] = set()  # ranks that write, too
        trees: dict[str, Any] = {}
        small: dict[str, Tensor] = {}
        for name, state in states.items():
            files: list[str] = []
            if state.holders is not None:
                files += self._copy_rows(name, state)
            elif state.kind == "model" or (state.kind in OWN_FILE and state.tensors):
                files.append(f"{name}.safetensors")
                self._copy(files[0], state.tensors)
            elif state.tensors:
                files.append(TENSORS)
                small.update(state.tensors)
            if state.has_tree:
                files.append(TREES)
                trees[name] = state.tree
            self.states[name] = StateEntry(state.kind, tuple(files))
        if small:
            self._copy(TENSORS, small)
        if rank == 0:  # a line for each state: the file can be read, and compared with `diff`
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(tree)}" for name, tree in trees.items())
            self.files[TREES] = [(0, f"{{\n{lines}\n}}\n".encode())]

    def _copy(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """On rank 0: copy tensors of which no rank holds a part."""
        if self._rank == 0:
            layout = lay_out(tensors, {})
            copies = self._memory(file, tensors).copy(tensors)
            self.files[file] = [(0, layout.header), *((at, copies[name]) for name, at in layout.offsets.items())]

    def _memory(self, file: str, tensors: Mapping[str, Tensor], size: int = 0) -> Memory:
        """Return memory for the copies of these tensors. size: bytes, if there are no tensors yet."""
        rows = [sharded.local_rows(tensor) for tensor in tensors.values()]
        size = size or sum(tensor.nbytes for tensor in rows)
        memory = self._memories.get(file)
        if memory is None or memory.size < size:
            is_pinned = any(has_streams(tensor.device) for tensor in rows)
            memory = self._memories[file] = Memory(size, is_pinned)
        return memory

    def _copy_rows(self, name: str, state: SavedState) -> list[str]:
        """Copy what this rank writes of a state whose rows ranks hold; returns the state's files, of all ranks."""
        ranks, tensors = state.holders, state.tensors
        assert ranks is not None
        rank, count = ranks.rank, ranks.world_size
        by_size = sorted(tensors, key=lambda key: (-tensors[key].numel() * tensors[key].itemsize, key))
        assigned = [by_size[number::count] for number in range(count)]
        files = part_names(name, count, ".safetensors")
        # transformers requires the entry. All ranks lay out all, so that all find what safetensors cannot hold.
        layouts = [lay_out({key: tensors[key] for key in keys}, {"format": "pt"}) for keys in assigned]
        if not sharded.are_first(ranks):  # another machine writes them
            return []
        if self._shares:
            held = {key: tensor for key, tensor in tensors.items() if rank == 0 or is_sharded(tensor)}
            copies = self._memory(files[rank], held).copy(held)
            for number in (*range(rank, count), *range(rank)):  # writes to one file wait for each other
                spans = sharded.spans_of(layouts[number].offsets, tensors, rank)
                parts: list[Part] = [(0, layouts[number].header)] if number == rank else []
                parts += [(at, copies[key][start : start + size]) for at, start, size, key in spans]
                self.files[files[number]] = parts
                self.shared[files[number]] = layouts[number].size
        else:
            layout = layouts[rank]
            image = self._memory(files[rank], {}, layout.size).bytes.numpy().data[: layout.size]
            image[: len(layout.header)] = layout.header
            for at, data in sharded.exchange_rows([layout.offsets for layout in layouts], tensors, ranks):
                image[at : at + len(data)] = data
            self.files[files[rank]] = [(0, image)]
        self.others |= {*ranks.members} - {ranks.members[rank]}
        index = f"{name}.safetensors{INDEX}"
        if rank == 0:
            self.files[index] = [(0, index_text(dict(zip(files, assigned, strict=True)), tensors))]
        return [index, *files]


# The threads that write.


def begin(root: Path, step: int) -> Path:
    """Make the directory into which all ranks write a checkpoint before it gets its name."""
    try:
        draft = disk.partial(directory.free_name(root, step))
        os.mkdir(draft)
        return draft
    except OSError as error:
        raise _failed(root, step, error) from error


def _failed(root: Path, step: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} could not be written into {root}: {error}; earlier ones are unchanged"
    )


def write(draft: Path, snapshot: Snapshot, manifest: Manifest) -> None:
    """On rank 0: write its files, wait for those of other ranks, and give the directory its name.

    Raises CheckpointError if writing failed on any rank, for example because the disk is full.
    """
    root = draft.parent
    try:
        final = directory.free_name(root, manifest.step)
        try:
            entries = _write_files(draft, snapshot)
            entries |= wait_for(draft, snapshot.others)
            # A digest needs bytes in order, and those of a shared file come from all ranks: it is read again.
            digests = {file: Digest(directory.blocks_of(draft / file)) for file in snapshot.shared}
            entries |= {file: FileEntry(size, digests[file].wait()) for file, size in snapshot.shared.items()}
            text = replace(manifest, states=snapshot.states, files=entries).text()
            disk.write(draft / directory.MANIFEST, [(0, text)])
            disk.sync(draft)  # the names of all files, before the directory has a name that is looked for
            os.rename(draft, final)
        except BaseException:
            with suppress(OSError):
                disk.remove(draft)
            raise
        disk.sync(root)  # else a crash may undo the rename, after old checkpoints are removed
    except OSError as error:
        raise _failed(root, manifest.step, error) from error


def write_part(draft: Path, snapshot: Snapshot, rank: int) -> None:
    """On another rank: write its files, and tell rank 0.

    Raises CheckpointError if they cannot be written. Rank 0 raises it, too.
    """
    try:
        report(draft, rank, _write_files(draft, snapshot))
    except OSError as error:
        if not draft.exists():  # rank 0 has given up, and reports the reason
            return
        give_up(draft, rank, str(error))
        raise CheckpointError(
            f"rank {rank} could not write its part of the checkpoint into {draft.parent}: {error}; earlier "
            "ones are unchanged"
        ) from error


def _write_files(draft: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
    """Write this rank's files, while threads compute the digests of those that no other rank writes."""
    alone = {name: parts for name, parts in snapshot.files.items() if name not in snapshot.shared}
    digests = {name: Digest(data for _, data in parts) for name, parts in alone.items()}
    for name, parts in snapshot.files.items():
        if name in snapshot.shared:
            disk.reserve(draft / name, snapshot.shared[name])
        disk.write(draft / name, parts)
    return {
        name: FileEntry(sum(len(data) for _, data in parts), digests[name].wait()) for name, parts in alone.items()
    }


class BackgroundTask:
    """Runs one task at a time in a thread that the process joins at exit; at once if no thread can be started.

    Errors are raised by whoever calls `pop_error`; errors that nobody read are printed at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []
        weakref.finalize(self, _print, self._failures)  # no method, which would keep this object

    def start(self, work: Callable[[], Any]) -> None:
        """Start a task; none may be running."""
        assert self._thread is None
        thread = threading.Thread(target=_run, args=(work, self._failures), name=self._name)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the interpreter is shutting down, and waits for this thread
            _run(work, self._failures)

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


def _print(failures: list[BaseException]) -> None:
    for failure in failures:
        print(f"duoka: error: {failure}", file=sys.stderr)


class Digest:
    """The SHA-256 of a file's bytes, computed in a thread."""

    def __init__(self, blocks: Iterable[disk.Data]) -> None:
        self._digest, self._task = hashlib.sha256(), BackgroundTask("duoka-digest")
        self._task.start(lambda: self._update(blocks))

    def _update(self, blocks: Iterable[disk.Data]) -> None:
        for block in blocks:
            self._digest.update(block)

    def wait(self) -> str:
        """Return the digest in hexadecimal, or raise the error of reading."""
        self._task.finish()
        if error := self._task.pop_error():
            raise error
        return self._digest.hexdigest()


# The marks of ranks other than 0: files, as a thread must not call collectives while the training loop does.


def _mark(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank}.json"


def _leave(draft: Path, rank: int, value: Any) -> None:
    path = _mark(draft, rank)  # renamed, so that rank 0 never reads half a mark
    disk.write(path.with_suffix(disk.PARTIAL), [(0, json.dumps(value).encode())])
    os.rename(path.with_suffix(disk.PARTIAL), path)


def report(draft: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Tell rank 0 that all is on the disk that this rank writes."""
    _leave(draft, rank, {name: asdict(entry) for name, entry in entries.items()})


def give_up(draft: Path, rank: int, why: str) -> None:
    """Tell rank 0 that this rank cannot write its files; if not even that can be written, remove the directory."""
    try:
        _leave(draft, rank, {"error": why})
    except OSError:
        with suppress(OSError):
            disk.remove(draft)


def wait_for(draft: Path, ranks: Collection[int], patience: float = PATIENCE) -> dict[str, FileEntry]:
    """Wait for the marks of other ranks, remove them, and return the digests in them.

    Raises CheckpointError if a rank could not write its files, or has written nothing for `patience` seconds.
    """
    entries: dict[str, FileEntry] = {}
    missing, last, since = sorted(ranks), None, time.monotonic()
    while missing:
        for rank in [*missing]:
            with suppress(FileNotFoundError):
                mark = json.loads(_mark(draft, rank).read_bytes())
                if "error" in mark:
                    raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {mark['error']}")
                entries |= {name: FileEntry(**entry) for name, entry in mark.items()}
                _mark(draft, rank).unlink()
                missing.remove(rank)
        if not draft.exists():  # `give_up`, on a full disk
            raise CheckpointError("another rank could not write its part of the checkpoint, nor report the reason")
        now, progress = time.monotonic(), _progress(draft)
        if progress != last:  # a slow disk is no failure: what counts is the time without any write
            last, since = progress, now
        if missing and now - since > patience:
            names = ", ".join(map(str, missing))
            raise CheckpointError(f"rank {names} has written nothing of the checkpoint for {patience:.0f} s")
        time.sleep(_LOOK if missing else 0)
    return entries


def _progress(draft: Path) -> tuple[int, int]:
    """Return the size of all files, and the time of the last write."""
    with suppress(OSError):
        status = [path.stat() for path in draft.iterdir()]
        return sum(each.st_size for each in status), max((each.st_mtime_ns for each in status), default=0)
    return -1, -1
