"""Weights in several files with an index, and directories with weights under usual names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duoka.checkpoint.contents import FileContents
from duoka.errors import WeightsError

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
    """Return True for an index, or a directory with one or with a file of a usual name."""
    if path.is_dir():
        return _main(path) is not None
    return path.name.endswith(".index.json")


def read(path: Path, objects: str = "refuse") -> FileContents:
    """Read the contents of all files of an index."""
    from duoka.checkpoint import formats

    main = _main(path) if path.is_dir() else path
    assert main is not None
    if not main.name.endswith(".index.json"):
        return formats.read(main, objects)  # type: ignore[arg-type]
    places, metadata = _index(main)
    parts = {name: formats.read(main.parent / name, objects) for name in sorted(set(places.values()))}  # type: ignore[arg-type]
    tree: dict[str, Any] = {}
    for tensor, file in places.items():
        if tensor not in parts[file].tree:
            raise WeightsError(f"{main} says that {tensor!r} is in {file}, but it is not")
        tree[tensor] = parts[file].tree[tensor]

    def check() -> None:
        for part in parts.values():
            part.check()

    notes = tuple(sorted({note for part in parts.values() for note in part.notes}))
    name = f"{next(iter(parts.values())).format}, {len(parts)} files"
    return FileContents(path, name, tree, metadata, notes, check)


def _main(directory: Path) -> Path | None:
    found = [directory / name for name in USUAL if (directory / name).is_file()]
    others = [*sorted(directory.glob("*.index.json")), *sorted(directory.glob("*.safetensors"))]
    return found[0] if found else others[0] if len(others) == 1 else None


def _index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file of each tensor, and the metadata."""
    try:
        index = json.loads(path.read_bytes())
        places = index["weight_map"]
        metadata = {str(key): str(value) for key, value in index.get("metadata", {}).items()}
        wrong = [name for name in places.values() if Path(name).name != name or name in ("", ".", "..")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged, or not an index of weights: {error}") from error
    if not places or wrong:
        raise WeightsError(f"{path} may only name files beside it, but names {wrong[0] if wrong else 'none'!r}")
    return places, metadata
