"""Directories of weights: duoka's checkpoints, files with an index, and files under usual names.

The directory of a run stands for its newest intact step.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from duoka.checkpoint import directory as checkpoints
from duoka.checkpoint import formats
from duoka.checkpoint.directory import Manifest
from duoka.checkpoint.formats import FileContents, Objects, safetensors
from duoka.errors import CheckpointDamaged, WeightsError

# Files that represent a directory, in order of preference.
USUAL = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "model.pth",
)


def matches(path: Path) -> bool:
    """Return True for a checkpoint's manifest, an index, or a directory with one or with a file of a usual name."""
    if path.is_file():
        return path.name == checkpoints.MANIFEST or path.name.endswith(checkpoints.INDEX)
    return _is_checkpoint(path) or _main(path) is not None


def read(path: Path, objects: Objects = "refuse") -> FileContents:
    """Read the tensors of a checkpoint by their saved names, or of all files of an index."""
    if path.name == checkpoints.MANIFEST or (path.is_dir() and _is_checkpoint(path)):
        return _checkpoint(path.parent if path.is_file() else path)
    main = _main(path) if path.is_dir() else path
    assert main is not None
    if not main.name.endswith(checkpoints.INDEX):
        return formats.read(main, objects)
    weight_map, metadata = _index(main)
    files = {name: formats.read(main.parent / name, objects) for name in sorted(set(weight_map.values()))}
    for tensor, file in weight_map.items():
        if tensor not in files[file].tree:
            raise WeightsError(f"{main} says that {tensor!r} is in {file}, but it is not")

    def check() -> None:
        for contents in files.values():
            contents.check()

    tree = {tensor: files[file].tree[tensor] for tensor, file in weight_map.items()}
    notes = tuple(sorted({note for contents in files.values() for note in contents.notes}))
    name = f"{next(iter(files.values())).format}, {len(files)} files"
    return FileContents(path, name, tree, metadata, notes, check)


def _main(directory: Path) -> Path | None:
    """Return the file that represents a directory: of a usual name, or the only one."""
    usual = [directory / name for name in USUAL if (directory / name).is_file()]
    others = [*sorted(directory.glob(f"*{checkpoints.INDEX}")), *sorted(directory.glob("*.safetensors"))]
    return usual[0] if usual else others[0] if len(others) == 1 else None


def _index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of each tensor, and the metadata."""
    try:
        index = json.loads(path.read_bytes())
        weight_map = index["weight_map"]
        metadata = {str(key): str(value) for key, value in index.get("metadata", {}).items()}
        wrong = [name for name in weight_map.values() if Path(name).name != name or name in ("", ".", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged, or not an index of weights: {error}") from error
    if not weight_map or wrong:
        raise WeightsError(f"{path} may only name files beside it, but names {wrong[0] if wrong else 'none'!r}")
    return weight_map, metadata


# duoka's own checkpoints.


def _is_checkpoint(directory: Path) -> bool:
    return (directory / checkpoints.MANIFEST).is_file() or bool(checkpoints.steps(directory))


def _checkpoint(root: Path) -> FileContents:
    faults: list[str] = []
    for directory in [root] if (root / checkpoints.MANIFEST).is_file() else reversed(checkpoints.steps(root)):
        try:
            manifest = checkpoints.read(directory)
            made = {key: str(value) for key, value in manifest.made.items()}
            skipped = tuple(f"skipped: {fault}" for fault in faults)
            check = partial(_check, directory, manifest)
            name = f"duoka checkpoint of step {manifest.step}"
            return FileContents(directory, name, _tree(directory, manifest), made, skipped, check)
        except CheckpointDamaged as error:
            faults.append(str(error))
    raise WeightsError("; ".join(faults))


def _check(directory: Path, manifest: Manifest) -> None:
    try:
        checkpoints.check(directory, manifest, [name for name in manifest.files if name.endswith(".safetensors")])
    except CheckpointDamaged as error:
        raise WeightsError(str(error)) from error


def _tree(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Map models to their names, optimizers to "optimizer.NAME", all other tensors to "random and other states"."""
    tree: dict[str, Any] = {}
    for file in manifest.files:
        owners = [(name, state.kind) for name, state in manifest.states.items() if file in state.files]
        if file.endswith(".safetensors") and owners:
            name, kind = owners[0]
            at = name if kind == "model" or name.startswith(kind) else f"{kind}.{name}"
            files = manifest.states[name].files
            own_file = file == f"{name}.safetensors" or any(other.endswith(checkpoints.INDEX) for other in files)
            tensors = safetensors.read(directory / file).tree
            tree.setdefault(at if own_file else "random and other states", {}).update(tensors)
    return tree
