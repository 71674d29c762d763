"""`save_weights`: save a model's tensors under the model's own names, atomically.

With `max_shard_size` in several files with an index, in the format of Hugging Face's libraries:

    model.safetensors.index.json          maps tensors to files
    model-00001-of-00003.safetensors      …

Files that an index names are never overwritten: a save to the same path uses unused names, then replaces the index
atomically, and only then removes the old files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint.directory import INDEX
from duoka.checkpoint.formats import is_sharded
from duoka.checkpoint.formats.safetensors import lay_out
from duoka.checkpoint.names import WRAPPERS
from duoka.checkpoint.pickled import write_together
from duoka.checkpoint.ranks import Outcome, Ranks, on_first, ranks_here, together
from duoka.checkpoint.sharded import Part, are_first, holders, share_files, write_rows
from duoka.collectives.base import Collectives, OneRank
from duoka.errors import OptionError, WeightsError
from duoka.planning.options import SIZES
from duoka.system import disk
from duoka.view.tensor.batch import BatchTensor

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_PARALLEL = frozenset({"DataParallel", "DistributedDataParallel"})
_UNITS = {"": 1, **SIZES}


def save_weights(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Save a model's parameters and buffers under its own names, without what wrappers add to them.

    The file is replaced atomically. With several ranks all must call this; rank 0 writes. Of sharded tensors each
    rank of a machine writes its own rows; ranks on several machines send them to the rank that writes the file.

    Args:
        model: the model, or its state dict.
        path: `.safetensors`; or `.pth`, `.pt`, `.bin`, `.ckpt` for the format of `torch.save`.
        metadata: strings to keep in the file's header (safetensors only).
        max_shard_size: bytes, or "5GB": larger models become several files and an index, with Hugging Face's names
            (`model-00001-of-00003.safetensors`, `model.safetensors.index.json`). None: one file.
        ranks: the ranks that save together; by default those that hold parts of the model, else those of
            torch.distributed.

    Raises:
        OptionError: `path` has another suffix, or the size is invalid.
        WeightsError: the file cannot be written, or a tensor cannot be stored in safetensors.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", *PICKLES):
        raise OptionError("path", str(path), f"a name that ends in .safetensors, or in {', '.join(PICKLES)}")
    most = None if max_shard_size is None else parse_size(max_shard_size)
    tensors = plain_state(model)
    among = holders(tensors.values())
    ranks = ranks or (ranks_here() if among is None else among.all_ranks)
    if among is None:
        on_first(ranks, partial(write_weights, tensors, path, metadata or {}, most))
    else:
        _WeightsFiles(tensors, path, metadata or {}, most, among, ranks).write()


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], most: int | None = None
) -> None:
    """Write whole tensors in the format of the suffix; to several files if they are more than `most` bytes.

    Raises WeightsError if the file cannot be written, or the format cannot hold the tensors.
    """
    _WeightsFiles(tensors, path, metadata, most, None, OneRank()).write()


class _WeightsFiles:
    """Tensors in one file, or in several, written by `ranks`, of which those of `among` hold rows of sharded tensors.

    If the ranks share files, rank 0 makes and renames all of them, and each rank writes its rows. Else each makes,
    writes and renames some of the safetensors files; rank 0 those of `torch.save`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        path: Path,
        metadata: Mapping[str, str],
        most: int | None,
        among: Collectives | None,
        ranks: Ranks,
    ) -> None:
        self._path, self._tensors, self._among, self._ranks = path, tensors, among, ranks
        self._files = [dict(tensors)] if most is None else split(tensors, most)
        self._is_pickle = path.suffix in PICKLES
        about = {"format": "pt", **metadata}  # transformers requires it
        self._layouts = [] if self._is_pickle else [lay_out(file, about) for file in self._files]
        self._made: dict[int, Path] = {}  # partial files that this rank renames, by the number of the file

    def write(self) -> None:
        """Write the files. Raises WeightsError if writing failed, on any rank; the old files are unchanged."""
        names = self._first(self._free_names)
        try:
            among = self._among
            shares = self._is_pickle or among is None or share_files(self._ranks, self._path.parent, are_first(among))
            if shares:
                drafts = self._first(lambda: self._make(names, range(len(names))))
            else:
                assert among is not None
                own = range(among.rank, len(names) if are_first(among) else 0, among.world_size)
                drafts = self._all(lambda: self._make(names, own))
            self._write_pickles(drafts) if self._is_pickle else self._all(lambda: self._write_rows(drafts, shares))
            self._all(lambda: self._rename(names))
            self._first(lambda: self._finish(names))
        except BaseException:
            if len(names) > 1:  # those renamed already, but for what the index still names
                _remove(self._sibling(name) for name in {names[number] for number in self._made} - _named(self._path))
            raise
        finally:
            for partial_file in self._made.values():
                disk.discard(partial_file)

    def _first(self, act: Callable[[], Outcome]) -> Outcome:
        return on_first(self._ranks, lambda: self._guarded(act))

    def _all(self, act: Callable[[], Outcome]) -> Outcome:
        return together(self._ranks, lambda: self._guarded(act), f"saving {self._path}", WeightsError)

    def _guarded(self, act: Callable[[], Outcome]) -> Outcome:
        try:
            return act()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._is_pickle:  # by which torch.save tells a failed write
                raise
            why = str(error).splitlines()[0]
            raise WeightsError(f"{self._path} cannot be written; the old file is unchanged: {why}") from error

    def _sibling(self, name: str) -> Path:
        return self._path.with_name(name)

    def _free_names(self) -> list[str]:
        """Return names that the index does not name."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number, named = len(self._files), _named(self._path)
        if number == 1:
            return [self._path.name]
        stems = (f"{self._path.stem}.{again}" if again else self._path.stem for again in count())
        choices = (part_names(stem, number, self._path.suffix) for stem in stems)
        return next(names for names in choices if not named & set(names))

    def _make(self, names: Sequence[str], numbers: Iterable[int]) -> Mapping[int, Path]:
        for number in numbers:  # noted one by one, as all that are made are removed after an error
            self._made[number] = disk.partial_of(self._sibling(names[number]))
            if self._layouts and self._among is not None:
                disk.reserve(self._made[number], self._layouts[number].size)
        return self._made

    def _rename(self, names: Sequence[str]) -> None:
        for number, draft in self._made.items():
            disk.put(draft, self._sibling(names[number]))

    def _write_pickles(self, drafts: Mapping[int, Path]) -> None:
        for number, file in enumerate(self._files):
            path = drafts[number]
            if self._among is None:
                self._guarded(lambda: torch.save(file, path))  # noqa: B023
                self._guarded(lambda: disk.sync(path))  # noqa: B023
            else:
                write_together(file, path, self._ranks, self._first)

    def _write_rows(self, drafts: Mapping[int, Path], shares: bool) -> None:
        def write(number: int, parts: Iterable[Part]) -> None:
            head = [(0, memoryview(self._layouts[number].header))] if number in self._made else []
            disk.write(drafts[number], chain(head, parts))

        offsets = [layout.offsets for layout in self._layouts]
        write_rows(offsets, self._tensors, self._among or OneRank(), shares, write)

    def _finish(self, names: Sequence[str]) -> None:
        """Replace the index, or remove it, and then the files that it named."""
        old, index = _named(self._path), self._sibling(self._path.name + INDEX)
        if len(names) > 1:  # from this rename on the new files count: the old ones go after it
            text = index_text(dict(zip(names, self._files, strict=True)), self._tensors)
            disk.replace_by(index, text)
            _remove([self._path, *map(self._sibling, old)])
        elif old:
            _remove([index, *map(self._sibling, old)])


# Several files with an index.


def parse_size(text: int | str) -> int:
    """Parse a number of bytes, or "5GB", "500MB", "2GiB". Raises OptionError."""
    if type(text) is int and text > 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text.strip()) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise OptionError("max_shard_size", text, "a number of bytes above 0, such as 5_000_000_000 or '5GB'")
    return int(float(match[1]) * unit)


def split(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Split tensors, in order, into files of at most `most` bytes; a larger tensor has a file by itself."""
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        more = tensor.numel() * tensor.itemsize
        if files[-1] and size + more > most:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += more
    return files


def part_names(stem: str, number: int, suffix: str) -> list[str]:
    """Return `model-00001-of-00003.safetensors`, …."""
    return [f"{stem}-{part:05}-of-{number:05}{suffix}" for part in range(1, number + 1)]


def index_text(files: Mapping[str, Iterable[str]], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the contents of an index. files: the names of the tensors in each."""
    size = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    offsets = {name: file for file, names in files.items() for name in names}
    return (json.dumps({"metadata": {"total_size": size}, "weight_map": offsets}, indent=2) + "\n").encode()


def _named(path: Path) -> set[str]:
    """Return the files that the index of `path` names; ignores those of other paths."""
    part = re.compile(rf"{re.escape(path.stem)}(\.\d+)?-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    try:
        offsets = json.loads(path.with_name(path.name + INDEX).read_bytes())["weight_map"]
        return {name for name in offsets.values() if part.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):  # a file that no index names does no harm
            os.unlink(file)


# The names and tensors of a model.


def plain_state(model: nn.Module | Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a model's tensors by its own names: sharded ones as they are, others whole.

    Raises WeightsError if two would get the same name.
    """
    state = dict(model) if isinstance(model, Mapping) else model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(
            f"{others[0]!r} is not a tensor but {type(state[others[0]]).__name__}; a duoka.Checkpoint can save it"
        )
    wrapped = _wrapped(model)
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain_name = _without(name, wrapped)
        if plain_name in plain:
            raise WeightsError(f"two tensors would have the name {plain_name!r}, one of them is {name!r}")
        plain[plain_name] = sharded_or_gathered(tensor)
    return plain


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the names in the model's state dict to its own names."""
    wrapped = _wrapped(model)
    return {name: _without(name, wrapped) for name in model.state_dict()}


def sharded_or_gathered(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as it is, and any other whole."""
    return tensor if is_sharded(tensor) else gathered(tensor)


def gathered(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor to the CPU of rank 0, and to the meta device elsewhere; return others unchanged.

    All ranks must call this. It needs device memory for one whole tensor at a time.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.full_tensor().detach()
    # Meta tensors elsewhere: the other ranks still know names and shapes, and keep no memory.
    rank = tensor._spec.view.ranks.rank if isinstance(tensor, BatchTensor) else torch.distributed.get_rank()
    return full.to("meta" if rank else "cpu")


def _wrapped(model: nn.Module | Mapping[str, Any]) -> set[str]:
    """Return the paths named "module" that a wrapper has inserted."""
    if isinstance(model, Mapping):
        return {"module"} if model and all(name.startswith("module.") for name in model) else set()
    parallel = [
        path for path, part in model.named_modules(remove_duplicate=False) if type(part).__name__ in _PARALLEL
    ]
    return {f"{path}.module" if path else "module" for path in parallel}


def _without(name: str, wrapped: set[str]) -> str:
    parts = name.split(".")
    kept = [
        part
        for number, part in enumerate(parts[:-1])
        if ".".join(parts[: number + 1]) not in wrapped and part not in WRAPPERS - {"module"}
    ]
    return ".".join([*kept, parts[-1]])
