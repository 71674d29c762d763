"""`save_weights`: save a model's tensors under the model's own names, atomically."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint import disk
from duoka.checkpoint.drafts import Draft, all_see, write_own
from duoka.checkpoint.gathering import gathered
from duoka.checkpoint.image import lay_out, straight
from duoka.checkpoint.names import WRAPPERS
from duoka.checkpoint.parts import are_first, holders
from duoka.checkpoint.pickled import write_together
from duoka.checkpoint.ranks import Outcome, Ranks, SingleRank, on_first, ranks_here, together
from duoka.checkpoint.rows import is_sharded
from duoka.checkpoint.shards import free_names, parse_size, remove_shards, remove_unnamed, replace_index, split
from duoka.errors import OptionError, WeightsError
from duoka.view.collectives.base import Collectives
from duoka.view.tensor.batch import BatchTensor

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_PARALLEL = frozenset({"DataParallel", "DistributedDataParallel"})


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
    rank of a machine writes its own rows; ranks on several machines gather them one at a time.

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
    tensors = plain_state(model, part_or_whole)
    among = holders(tensors.values())
    ranks = ranks or (ranks_here() if among is None else among.whole)
    if among is None:
        on_first(ranks, partial(write_weights, tensors, path, metadata or {}, most))
    else:
        _Writing(tensors, path, metadata or {}, most, among).by(ranks)


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], most: int | None = None
) -> None:
    """Write whole tensors in the format of the suffix; to several files if they are more than `most` bytes.

    Raises:
        WeightsError: the file cannot be written, or the format cannot hold the tensors.
    """
    _Writing(tensors, path, metadata, most).by(SingleRank())


class _Writing:
    """The writing of tensors to one file, or to several, by the ranks `among` that hold their rows.

    Each rank writes its own rows into all files. Ranks that do not share files gather instead, tensor by tensor, what
    they write: each has some files (of `torch.save` rank 0 has all), and its memory never holds more than one tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        path: Path,
        metadata: Mapping[str, str],
        most: int | None,
        among: Collectives | None = None,
    ) -> None:
        self._path, self._tensors, self._among = path, tensors, among
        self._files = [dict(tensors)] if most is None else split(tensors, most)
        self._rank, self._count = (0, 1) if among is None else (among.rank, among.world_size)
        self._writes = among is None or are_first(among)
        self._own = slice(self._rank, None, self._count) if self._writes else slice(0)
        self._is_pickle = path.suffix in PICKLES
        about = {"format": "pt", **metadata}  # transformers requires it
        self._layouts = [] if self._is_pickle else [lay_out(file, about) for file in self._files]
        self._in_order = [list(file.places) for file in self._layouts] or list(map(list, self._files))
        numbers = [range(rank, len(self._files), self._count) for rank in range(self._count)]
        self._assigned = [[name for number in own for name in self._in_order[number]] for own in numbers]

    def by(self, ranks: Ranks) -> None:
        """Write by these ranks, all of the run.

        Raises:
            WeightsError: writing failed, on any rank; the old files are unchanged.
        """
        path, files = self._path, self._files
        names = on_first(ranks, lambda: [path.name] if len(files) == 1 else free_names(path, len(files)))
        try:
            if self._among is None or not self._write_together(ranks, names):
                together(ranks, partial(self._write_gathered, names), f"saving {path}", WeightsError)
            on_first(ranks, lambda: self._finish(names))
        except BaseException:
            if len(files) > 1:
                remove_unnamed(path, names if ranks.rank == 0 else names[self._own])
            raise

    def _write_together(self, ranks: Ranks, names: Sequence[str]) -> bool:
        """Let each rank write its own rows into all files; returns False if it must gather files of its own."""
        made: list[Path] = []  # on rank 0
        try:
            beside = on_first(ranks, lambda: self._begin(names, made))
            if self._is_pickle:
                for path, file in zip(beside, self._files, strict=True):
                    write_together(file, path, ranks, lambda act: on_first(ranks, lambda: self._saying(act)))
            elif all_see(ranks, beside[0], self._writes):
                together(ranks, partial(self._fill, beside), f"saving {self._path}", WeightsError)
            else:
                return False
            on_first(ranks, lambda: self._saying(lambda: self._put(beside, names)))
            return True
        finally:
            for path in made:
                disk.discard(path)

    def _begin(self, names: Sequence[str], made: list[Path]) -> list[Path]:
        """On rank 0: begin partial files."""
        with self._failing():
            for name in names:
                made.append(disk.place_beside(self._path.with_name(name)))
            for path, layout in zip(made, self._layouts, strict=not self._is_pickle):
                disk.reserve(path, Draft.of(layout, path).size)
        return made

    def _fill(self, beside: Sequence[Path]) -> None:
        """Write this rank's rows into partial files of safetensors."""
        if not self._writes:
            return
        drafts = [Draft.of(layout, path) for layout, path in zip(self._layouts, beside, strict=True)]
        first = self._rank * len(drafts) // self._count
        with self._failing():
            for draft in (*drafts[first:], *drafts[:first]):  # writes to one file wait for each other
                write_own(draft, self._tensors, self._rank == 0)

    def _put(self, beside: Sequence[Path], names: Sequence[str]) -> None:
        for path, name in zip(beside, names, strict=True):
            disk.put(path, self._path.with_name(name))

    def _saying(self, act: Callable[[], Outcome]) -> Outcome:
        with self._failing():
            return _raising_os_errors(act)

    def _write_gathered(self, names: Sequence[str]) -> None:
        """Write this rank's files."""
        taken = map(itemgetter(1), gathered(self._tensors, self._assigned, self._rank))
        try:
            with self._failing():
                for number in range(len(names))[self._own]:
                    own = islice(taken, len(self._files[number]))
                    self._write_one(number, self._path.with_name(names[number]), own)
        finally:
            deque(taken, maxlen=0)  # the other ranks gather all theirs

    def _write_one(self, number: int, path: Path, taken: Iterator[Tensor]) -> None:
        if self._is_pickle:
            disk.replace(path, partial(_pickle, dict(zip(self._in_order[number], taken, strict=True))))
        else:
            disk.replace(path, lambda beside: disk.write(beside, straight(self._layouts[number], taken)))

    def _finish(self, names: Sequence[str]) -> None:
        with self._failing():
            if len(names) == 1:
                remove_shards(self._path)
            else:
                replace_index(self._path, dict(zip(names, self._files, strict=True)))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WeightsError(f"{self._path} cannot be written; the old file is unchanged: {error}") from error


def _pickle(tensors: dict[str, Tensor], path: Path) -> None:
    _raising_os_errors(lambda: torch.save(tensors, path))
    disk.sync(path)


def _raising_os_errors(act: Callable[[], Outcome]) -> Outcome:
    try:
        return act()
    except RuntimeError as error:  # raised by torch for a failed write
        raise OSError(str(error).splitlines()[0]) from error


def plain_state(
    model: nn.Module | Mapping[str, Any], taken: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return a model's tensors by its own names, each as `taken` gives it (default: whole).

    Raises:
        WeightsError: two would get the same name.
    """
    taken = taken or whole
    state = dict(model) if isinstance(model, Mapping) else model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(
            f"{others[0]!r} is not a tensor but {type(state[others[0]]).__name__}; a duoka.Checkpoint can save it"
        )
    wrapped = _wrapped(model)
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        own = _without(name, wrapped)
        if own in plain:
            raise WeightsError(f"two tensors would have the name {own!r}, one of them is {name!r}")
        plain[own] = taken(tensor)
    return plain


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the names in the model's state dict to its own names."""
    wrapped = _wrapped(model)
    return {name: _without(name, wrapped) for name in model.state_dict()}


def part_or_whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as it is, and any other whole."""
    return tensor if is_sharded(tensor) else whole(tensor)


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor to the CPU of rank 0, and to the meta device elsewhere; return others unchanged.

    All ranks must call this. It needs device memory for one whole tensor at a time.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor().detach()
    rank = tensor._spec.view.ranks.rank if isinstance(tensor, BatchTensor) else torch.distributed.get_rank()
    return gathered.to("meta" if rank else "cpu")


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
