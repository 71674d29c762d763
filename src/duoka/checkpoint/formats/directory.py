"""duoka's own checkpoints: the directory of a step, or of a run, for its newest intact step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from duoka.checkpoint import manifest
from duoka.checkpoint.contents import FileContents
from duoka.checkpoint.formats import safetensors
from duoka.errors import CheckpointDamaged, WeightsError


def matches(path: Path) -> bool:
    """Return True for the directory of a step or run, or a step's manifest."""
    if path.is_file():
        return path.name == manifest.NAME
    return (path / manifest.NAME).is_file() or bool(manifest.directories(path))


def read(path: Path, objects: str = "refuse") -> FileContents:
    """Read the tensors of a checkpoint, by their saved names; `check` compares the files' digests."""
    faults: list[str] = []
    step = path.parent if path.is_file() else path
    for directory in [step] if (step / manifest.NAME).is_file() else reversed(manifest.directories(step)):
        try:
            found = manifest.read(directory)
            return FileContents(
                directory,
                f"duoka checkpoint of step {found.step}",
                _tree(directory, found),
                {key: str(value) for key, value in found.made.items()},
                tuple(f"skipped: {fault}" for fault in faults),
                lambda directory=directory, found=found: _check(directory, found),  # type: ignore[misc]
            )
        except CheckpointDamaged as error:
            faults.append(str(error))
    raise WeightsError("; ".join(faults))


def _check(directory: Path, found: manifest.Manifest) -> None:
    try:
        manifest.check(directory, found, tuple(name for name in found.files if name.endswith(".safetensors")))
    except CheckpointDamaged as error:
        raise WeightsError(str(error)) from error


def _tree(directory: Path, found: manifest.Manifest) -> dict[str, Any]:
    """Map models to their names, optimizers to "optimizer.NAME", all other tensors to "random and other states"."""
    tree: dict[str, Any] = {}
    for file in found.files:
        owners = [(name, state.kind) for name, state in found.states.items() if file in state.files]
        if file.endswith(".safetensors") and owners:
            name, kind = owners[0]
            at = name if kind == "model" or name.startswith(kind) else f"{kind}.{name}"
            own = file == f"{name}.safetensors" or found.states[name].is_in_parts
            tree.setdefault(at if own else "random and other states", {}).update(
                safetensors.read(directory / file).tree
            )
    return tree
