"""`load_weights`: load the tensors of a file of any format into a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint import formats, names
from duoka.checkpoint.formats import Objects, Stored
from duoka.errors import WeightsError, WeightsMismatch
from duoka.private.torch import has_own_loading

LONGEST = 20  # rows of each kind in a table
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Loaded:
    """The result of `load_weights`; print it for a report.

    loaded: names of the model's tensors with new values. missing: those that the file does not have. unexpected:
    names in the file that the model does not have. wrong: names with differing shapes: the model's and the file's.
    skipped: names excluded by `only` or `skip`. notes: changes made to match names, devices and types.
    """

    path: Path
    format: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    table: str = ""

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        head = f"loaded {len(self.loaded)} tensors from {self.path} ({self.format}){skipped}"
        return "\n".join([head, *(f"  {note}" for note in self.notes), *([self.table] if self.table else [])])


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    key: str | None = None,
    rename: Mapping[str, str] | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    objects: Objects = "refuse",
) -> Loaded:
    """Load weights into `model` on its present device.

    Reads files of `torch.save` (`.pth`, `.pt`, `.bin`, `.ckpt`), safetensors, sharded files with an index, DCP
    directories and duoka's checkpoints. Finds the weights inside the file, and ignores what DataParallel,
    DistributedDataParallel, FSDP, `torch.compile` or Lightning add to names, in the file and in the model. No code in
    a file is run.

    Args:
        model: the model; unchanged if an error is raised.
        path: a file or a directory.
        strict: if True, the file must hold all tensors of the model and no others; if False, load those that match.
        key: path of the weights inside the file, such as "ema" or "state_dict.generator".
        rename: regular expressions and their replacements for the file's names: {"^encoder": "backbone"}.
        only: names, modules or globs of the model to load, such as "backbone" or "*.bias".
        skip: names, modules or globs that keep their values. For a model with another head: skip="head".
        objects: "refuse" rejects pickles with objects of unknown classes, such as whole modules; "inert" reads them
            with stand-ins that run no code.

    Returns:
        A report of what was loaded; print it to read it.

    Raises:
        WeightsMismatch: names or shapes do not match; the message is a table of them.
        UnsafePickle: the file is a pickle that would run code.
        WeightsError: the file cannot be read, is damaged, or holds several sets of weights that match.
    """
    contents = formats.read(path, objects)
    state = model.state_dict()
    targets = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    only, skip = ([patterns] if isinstance(patterns, str) else patterns for patterns in (only, skip))
    groups = names.groups(contents.tree)
    if rename:
        groups = {at: names.renamed(group, rename) for at, group in groups.items()}
    at = names.choose(groups, targets, key, path)
    pairing = _pair(targets, groups[at], only, skip)
    if strict:  # before anything is copied; a model that loads by itself may know other names
        exact = replace(pairing, missing={}, unexpected={}) if _loads_by_itself(model) else pairing
        _check(exact, contents.path, model)
    contents.check()
    notes = [*([f"found under {at!r}"] if at else []), *names.differences(pairing.pairs), *contents.notes]
    kinds = Counter((it.dtype, str(pairing.targets[name].dtype)[6:]) for name, it in pairing.sources.items())
    casts = [f"cast {theirs} → {ours} ({count})" for (theirs, ours), count in kinds.items() if theirs != ours]
    notes += [*pairing.notes, *casts]
    others = [group for group in groups if group and not at.startswith(group) and at]
    if others and key is None:
        notes.append(f"also in the file: {', '.join(others[:6])} (key= chooses)")
    pairing = _fill(model, pairing, contents.path, strict)
    return Loaded(
        contents.path,
        contents.format,
        tuple(pairing.pairs),
        tuple(pairing.missing),
        tuple(pairing.unexpected),
        pairing.wrong,
        pairing.skipped,
        tuple(notes),
        "" if pairing.is_exact else pairing.table(),
    )


@dataclass(frozen=True)
class Pairing:
    """The match of a model's tensors and a file's."""

    targets: Mapping[str, Tensor]  # the model's
    group: Mapping[str, Stored]  # the file's, by its own names
    pairs: Mapping[str, str]  # the file's name for each tensor to load, by the model's
    missing: Mapping[str, Shape]  # of those not in the file
    unexpected: Mapping[str, Shape]  # of those not in the model
    wrong: Mapping[str, tuple[str, str]]  # the model's shape and the file's, or types that cannot be converted
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """True if every tensor of either side has one of the other, or was skipped."""
        return not (self.missing or self.unexpected or self.wrong)

    @property
    def sources(self) -> dict[str, Stored]:
        """The file's tensors by the model's names."""
        return {name: self.group[name_in_file] for name, name_in_file in self.pairs.items()}

    def table(self) -> str:
        """Return aligned rows: the kind, the name, the shape, and the closest name in the file."""
        wrong = [
            (name, f"{ours} in the model", f"{theirs} in the file") for name, (ours, theirs) in self.wrong.items()
        ]
        missing = [(name, str(shape), self._nearest(name)) for name, shape in [*self.missing.items()][:LONGEST]]
        unexpected = [(name, str(shape), "") for name, shape in self.unexpected.items()]
        rows: list[tuple[str, ...]] = []
        for kind, cells, count in (
            ("wrong shape", wrong, len(wrong)),
            ("missing", missing, len(self.missing)),
            ("unexpected", unexpected, len(unexpected)),
        ):
            rows += [(kind, *row) for row in cells[:LONGEST]]
            rows += [(kind, f"… and {count - LONGEST} more", "", "")] if count > LONGEST else []
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        padded = ([*map(str.ljust, row, widths), row[3]] for row in rows)
        return "\n".join("  " + "  ".join(cells).rstrip() for cells in padded)

    def _nearest(self, name: str) -> str:
        """Name the unexpected tensor that is most similar to a missing one, preferring the same shape."""

        def likeness(other: str) -> float:
            return SequenceMatcher(None, names.plain(name), names.plain(other)).ratio()

        shape = self.missing[name]
        alike = [other for other, its in self.unexpected.items() if its == shape] or list(self.unexpected)
        best = max(alike[:500], key=likeness, default="")
        if best and (likeness(best) > 0.4 or self.unexpected[best] == shape):
            return f"nearest in the file: {best} {self.unexpected[best]}"
        return ""


def _pair(
    targets: Mapping[str, Tensor], group: Mapping[str, Stored], only: Sequence[str], skip: Sequence[str]
) -> Pairing:
    pairs = names.match(targets, group)
    wanted = set(names.chosen(targets, only, skip))
    missing: dict[str, Shape] = {}
    wrong: dict[str, tuple[str, str]] = {}
    fitting: dict[str, str] = {}
    for name, target in targets.items():
        if name not in wanted:
            continue
        if name not in pairs:
            missing[name] = tuple(target.shape)
        elif (why := _misfit(target, group[pairs[name]])) is not None:
            wrong[name] = why
        else:
            fitting[name] = pairs[name]
    # Tied tensors share memory, and some formats keep one of them. Without memory all have the address 0.
    loaded = [name for name in fitting if targets[name].numel() and not targets[name].is_meta] if missing else []
    memory = {_memory(targets[name]) for name in loaded}
    tied = [name for name in missing if _memory(targets[name]) in memory]
    notes = [f"not in the file, and tied to what is: {name}" for name in tied]
    unused = [name for name in group if name not in pairs.values()]
    ignored = set(names.extras(unused)) | (set(unused) - set(names.chosen(unused, only, skip)))
    counters = [name for name in missing if name.endswith("num_batches_tracked")]
    notes += [f"left out: {name}" for name in names.extras(unused)]
    if counters:  # torch 0.4 began to write them; torch also accepts files without
        notes.append(f"{len(counters)} counts of batches (num_batches_tracked) are not in the file and stay")
    for name in (*tied, *counters):
        del missing[name]
    unexpected = {name: group[name].shape for name in unused if name not in ignored}
    skipped = tuple(name for name in targets if name not in wanted)
    return Pairing(targets, group, fitting, missing, unexpected, wrong, skipped, tuple(notes))


def _misfit(target: Tensor, source: Stored) -> tuple[str, str] | None:
    """Return both shapes, or both types, if a tensor cannot be copied to its target; else None."""
    # A scalar and a tensor of one element are exchanged freely, as by `load_state_dict`.
    single = source.numel == target.numel() == 1 and max(target.dim(), len(source.shape)) <= 1
    if tuple(target.shape) != source.shape and not single:
        return str(tuple(target.shape)), str(source.shape)
    kind = getattr(torch, source.dtype, None)
    if not isinstance(kind, torch.dtype):
        return str(target.dtype)[6:], source.dtype
    loses = (kind.is_complex and not target.is_complex()) or (
        (kind.is_floating_point or kind.is_complex) and not (target.is_floating_point() or target.is_complex())
    )
    return (str(target.dtype)[6:], source.dtype) if loses else None


def _memory(tensor: Tensor) -> tuple[int, Shape, Shape]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _check(pairing: Pairing, path: Path, model: nn.Module) -> None:
    if not pairing.is_exact:
        fit = len(pairing.group) - len(pairing.unexpected) - len(pairing.wrong)
        head = f"{path} does not fit {type(model).__name__}: of {len(pairing.group)} tensors in the file, {fit} fit"
        raise WeightsMismatch("\n".join([head, pairing.table(), _hint(pairing)]))


def _hint(pairing: Pairing) -> str:
    """Suggest arguments that would load the file."""
    for name in pairing.missing:
        ends = [other for other in pairing.unexpected if other.endswith("." + name)]
        if len(ends) == 1 and len(pairing.missing) > 1:
            return f"it looks like rename={{r'^{ends[0][: -len(name) - 1]}\\.': ''}}"
    heads = {name.split(".")[0] for name in (*pairing.wrong, *pairing.missing)}
    head = f"skip={heads.pop()!r} leaves that part of the model as it is; " if len(heads) == 1 else ""
    return f"{head}strict=False loads what fits; rename={{…}} gives other names"


# Copying values into the model.


def _loads_by_itself(model: nn.Module) -> bool:
    """Return True if a module overrides loading: by a method, hooks, or extra state."""
    return type(model).load_state_dict is not nn.Module.load_state_dict or any(
        type(module).set_extra_state is not nn.Module.set_extra_state
        or type(module).state_dict is not nn.Module.state_dict
        or has_own_loading(module)
        for module in model.modules()
    )


def _fill(model: nn.Module, pairing: Pairing, path: Path, strict: bool) -> Pairing:
    """Copy the values into the model; returns the pairing with what the model then said."""
    targets, sources = pairing.targets, pairing.sources
    on_meta = any(targets[name].is_meta for name in sources)
    try:
        with torch.no_grad():
            if on_meta or _loads_by_itself(model):
                return _load_state(model, pairing, path, strict, assign=on_meta)
            for name, source in sources.items():
                target = targets[name]
                source.read_into(target if tuple(target.shape) == source.shape else target.view(source.shape))
    except (RuntimeError, MemoryError, TypeError, OSError) as error:  # of torch, or of a model's own loading
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
    return pairing


def _load_state(model: nn.Module, pairing: Pairing, path: Path, strict: bool, assign: bool) -> Pairing:
    """Load by `load_state_dict`, so that the model's own code handles names that only it knows.

    assign: the model gets the memory of the values, so it must not be that of the file.
    """
    targets, group = pairing.targets, pairing.group
    state: dict[str, Any] = {}
    for name, source in pairing.sources.items():
        state[name] = value = source.read_like(targets[name])
        if assign:
            cast = value.to(targets[name].dtype)
            state[name] = cast.clone() if cast is value else cast
    state |= {name: group[name].read() for name in pairing.unexpected}
    said = model.load_state_dict(state, strict=False, assign=assign)
    missing = {name: pairing.missing[name] for name in said.missing_keys if name in pairing.missing}
    unexpected = {name: group[name].shape for name in said.unexpected_keys if name in group}
    pairing = replace(pairing, missing=missing, unexpected=unexpected)
    if strict:
        _check(pairing, path, model)
    return pairing
