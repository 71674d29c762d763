"""Show, compare and convert files of weights, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.checkpoint import formats, names
from duoka.checkpoint.formats import FileContents, Objects, Stored
from duoka.errors import OptionError, WeightsError
from duoka.system.messages import printable

if TYPE_CHECKING:
    from torch import Tensor


def show(path: str | Path, key: str | None = None, objects: Objects = "refuse") -> str:
    """Return the contents of a file as text: names, shapes, types and sizes, without reading the tensors' data."""
    contents = formats.read(path, objects)
    tensors = contents.tensors() if key is None else _group(contents, key)[1]
    total = sum(tensor.nbytes for tensor in tensors.values())
    count = sum(tensor.numel for tensor in tensors.values())
    lines = [f"{path}: {contents.format}, {len(tensors)} tensors, {count:,} numbers, {_size(total)}"]
    lines += [f"  {printable(note)}" for note in contents.notes]
    rows = [
        (printable(name), str(list(tensor.shape)), tensor.dtype, _size(tensor.nbytes))
        for name, tensor in tensors.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, shape, dtype, size in rows:
        lines.append(f"  {name:{widths[0]}}  {shape:{widths[1]}}  {dtype:{widths[2]}}  {size:>{widths[3]}}")
    values = (
        [f"  {printable(name)} = {printable(value)}" for name, value in _values(contents.tree)] if key is None else []
    )
    if contents.metadata or values:
        lines += [
            "beside the tensors:",
            *(f"  {printable(name)} = {_short(text)}" for name, text in contents.metadata.items()),
            *values,
        ]
    return "\n".join(lines)


def _values(tree: Any, at: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the path and text of values that are not tensors, without long lists and deep dicts."""
    if isinstance(tree, Stored):
        return
    if isinstance(tree, (Mapping, list)) and tree and depth < 4:
        items = list(tree.items() if isinstance(tree, Mapping) else enumerate(tree))
        if len(items) <= 40 or isinstance(tree, Mapping):  # a longer list is shown in one line, cut
            for key, value in items:
                yield from _values(value, f"{at}.{key}" if at else str(key), depth + 1)
            return
    if at:
        yield at, _short(tree)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _group(contents: FileContents, key: str | None) -> tuple[str, dict[str, Stored]]:
    """Return the path within the file and the tensors of its weights: those under `key`, or the likeliest if None.

    Raises WeightsError if the file holds no weights, or none under `key`.
    """
    groups = names.groups(contents.tree)
    at = names.choose(groups, None, key, contents.path)
    return at, groups[at]


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor in two files. largest: absolute; relative: to the tensor's largest number."""

    name: str
    largest: float
    relative: float
    count: int
    numel: int


@dataclass(frozen=True)
class Comparison:
    """The comparison of two files. other: differing shapes or types, as text by name."""

    same: tuple[str, ...]
    different: tuple[Difference, ...]
    other: Mapping[str, str]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if both files hold the same tensors with the same values."""
        return not (self.different or self.other or self.only_first or self.only_second)

    def __str__(self) -> str:
        lines = [f"{len(self.same)} tensors are equal, {len(self.different)} differ"]
        width = max(map(len, [*(difference.name for difference in self.different), *self.other]), default=0)
        for difference in self.different:
            lines.append(
                f"  {printable(difference.name):{width}}  by up to {difference.largest:.3g} "
                f"({difference.relative:.2g} of its largest), {difference.count:,} of {difference.numel:,} numbers"
            )
        lines += [f"  {printable(name):{width}}  {what}" for name, what in self.other.items()]
        for title, only in (("only in the first", self.only_first), ("only in the second", self.only_second)):
            lines += [f"{title}: {', '.join(map(printable, only))}"] if only else []
        return "\n".join(lines)


def compare(first: str | Path, second: str | Path, key: str | None = None, objects: Objects = "refuse") -> Comparison:
    """Compare the tensors of two files, ignoring what wrappers add to names."""
    left, right = (_group(formats.read(path, objects), key)[1] for path in (first, second))
    pairs = names.match(left, right)
    same, different, unlike = [], [], {}
    for name, name_in_second in pairs.items():
        tensor, other = left[name], right[name_in_second]
        if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            unlike[name] = f"{list(tensor.shape)} {tensor.dtype} and {list(other.shape)} {other.dtype}"
        difference = _difference(name, tensor, other) if tensor.shape == other.shape else None
        if difference is not None:
            different.append(difference)
        elif name not in unlike:
            same.append(name)
    return Comparison(
        tuple(same),
        tuple(sorted(different, key=lambda it: -it.largest)),
        unlike,
        tuple(name for name in left if name not in pairs),
        tuple(name for name in right if name not in pairs.values()),
    )


def _difference(name: str, first: Stored, second: Stored) -> Difference | None:
    import torch

    try:
        left, right = (_wide(stored.read()) for stored in (first, second))
    except (RuntimeError, MemoryError, TypeError) as error:
        raise WeightsError(f"{name} cannot be read: {str(error).splitlines()[0]}") from error
    unequal = (left != right) & ~(torch.isnan(left) & torch.isnan(right))  # NaN in both files is no difference
    count = int(unequal.sum())
    if count == 0:
        return None
    distance = (left - right).abs()[unequal]
    largest = float(distance.nan_to_num(nan=float("inf")).max())
    scale = float(torch.maximum(left.abs(), right.abs()).nan_to_num().max())
    return Difference(name, largest, largest / scale if scale else largest, count, left.numel())


def _wide(tensor: Tensor) -> Tensor:
    import torch

    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def convert(
    source: str | Path,
    target: str | Path,
    key: str | None = None,
    rename: Mapping[str, str] | None = None,
    objects: Objects = "refuse",
    max_shard_size: int | str | None = None,
) -> str:
    """Convert a file of weights to the format of the target's suffix; returns a report.

    Wrappers' parts of names are removed. A target that ends in "/" becomes a DCP directory; one of more than
    `max_shard_size` bytes becomes several files and an index.
    """
    from duoka.checkpoint.saving import PICKLES, parse_size, plain_state, write_weights

    directory, target = str(target).endswith("/"), Path(target)
    if not directory and target.suffix not in (".safetensors", *PICKLES):
        allowed = f"a name that ends in .safetensors, {', '.join(PICKLES)}, or / for a DCP directory"
        raise OptionError("the target", str(target), allowed)
    most = None if max_shard_size is None else parse_size(max_shard_size)
    contents = formats.read(source, objects)
    contents.check()
    at, group = _group(contents, key)
    group = names.renamed(group, rename or {})
    tensors = plain_state({name: stored.read() for name, stored in group.items()})
    if directory:
        _write_dcp(tensors, target)
    else:
        write_weights(tensors, target, contents.metadata, most)
    others = [name for name in names.groups(contents.tree) if name and at and not at.startswith(name)]
    lines = [f"wrote {len(tensors)} tensors to {target}{f', found under {at!r}' if at else ''}", *contents.notes]
    lines += [f"not written, also in the file: {', '.join(others)} (--key chooses)"] if others and key is None else []
    return "\n".join(lines)


def _write_dcp(tensors: dict[str, Tensor], target: Path) -> None:
    import warnings

    from torch.distributed.checkpoint.state_dict_saver import save

    from duoka.system import disk

    if target.exists():
        raise WeightsError(f"{target} exists already; name a directory that does not")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is one process
        disk.replace(target, lambda draft: partial(save, no_dist=True)(tensors, checkpoint_id=str(draft)))
