"""Mutated files of weights: they raise duoka's errors or load; no other exception, no crash."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

import duoka
from duoka.checkpoint import directory as checkpoints
from duoka.checkpoint.directory import FileEntry
from tests.checkpoint.nets import Net, Own
from tests.checkpoint.runs import filled, small

KINDS = ("safetensors", "zip", "legacy", "pickle in a zip", "index", "dcp", "dcp data", "whole module", "manifest")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def made(folder: Path, kind: str) -> tuple[Path, Path, bytes]:
    """Create the file to mutate; returns the function that loads it, and its bytes."""
    root = folder / kind.replace(" ", "-")
    if not root.exists():
        root.mkdir()
        state = {"model": Net().state_dict(), "epoch": 3}
        duoka.save_weights(Net(), root / "net.safetensors")
        torch.save(state, root / "zip.pth")
        torch.save({"model": Net(), "own": Own()}, root / "whole.pth")
        torch.save(state, root / "legacy.pth", _use_new_zipfile_serialization=False)
        (root / "index.json").mkdir()
        duoka.save_weights(Net(), root / "index.json" / "a.safetensors")
        places = ",".join(f'"{name}": "a.safetensors"' for name in Net().state_dict())
        (root / "index.json" / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{places}}}}}')
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(Net().state_dict(), checkpoint_id=root / "dcp", no_dist=True)
        with small(root / "run", 1) as saved:
            saved.save()
    file, target = {
        "safetensors": ("net.safetensors", "net.safetensors"),
        "zip": ("zip.pth", "zip.pth"),
        "pickle in a zip": ("zip.pth", "zip.pth"),
        "legacy": ("legacy.pth", "legacy.pth"),
        "whole module": ("whole.pth", "whole.pth"),
        "index": ("index.json/model.safetensors.index.json", "index.json"),
        "dcp": ("dcp/.metadata", "dcp"),
        "dcp data": ("dcp/__0_0.distcp", "dcp"),
        "manifest": ("run/step-00000000/manifest.json", "run"),
        "states": ("run/step-00000000/states.json", "run"),
    }[kind]
    kept = root / "kept"
    if not kept.exists():
        kept.write_bytes((root / file).read_bytes())
    return root / file, root / target, kept.read_bytes()


def mutated(data: bytes, changes: list[tuple[int, int, int]], start: int, end: int) -> bytes:
    """Overwrite, insert or remove bytes between two positions."""
    found = bytearray(data)
    for at, kind, value in changes:
        place = min(start + at % (end - start), len(found) - 1)
        if kind == 0:
            found[place] = value
        elif kind == 1:
            found.insert(place, value)
        elif kind == 2:
            del found[place : place + 1 + value % 8]
        elif kind == 3:
            found[place] ^= 1 << value % 8
        else:
            del found[place:]
        if not found:
            return b""
    return bytes(found)


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 4), st.integers(0, 255)), min_size=1, max_size=4)


def load(kind: str, folder: Path, changes: list[tuple[int, int, int]]) -> None:
    file, target, data = made(folder, kind)
    start, end = 0, len(data)
    if kind == "safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
    elif kind == "pickle in a zip":  # leaves the zip file sound, so that the pickle is reached
        with zipfile.ZipFile(file.parent / "kept") as archive:
            start = archive.getinfo("zip/data.pkl").header_offset + 60
            end = start + archive.getinfo("zip/data.pkl").file_size
        changes = [(at, 3 if what != 0 else 0, value) for at, what, value in changes]
    file.write_bytes(mutated(data, changes, start, end))
    for objects in ("refuse", "inert"):
        model = Net()
        with suppress(duoka.WeightsError):
            assert str(duoka.load_weights(model, target, strict=False, objects=objects))  # type: ignore[arg-type]


def restore(folder: Path, changes: list[tuple[int, int, int]]) -> None:
    """A file of another program with a matching manifest raises a clear error, or is accepted."""
    file, target, data = made(folder, "states")
    file.write_bytes(mutated(data, changes, 0, len(data)))
    about = checkpoints.read(file.parent)
    entry = FileEntry(file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())
    (file.parent / "manifest.json").write_bytes(replace(about, files={**about.files, "states.json": entry}).text())
    for states in ({"model": filled(2), "note": [0.0]}, {"model": filled(2), "note": torch.zeros(())}, {"note": {}}):
        with duoka.Checkpoint(target, states) as saved, warnings.catch_warnings(), suppress(duoka.DuokaError):
            warnings.simplefilter("ignore")
            saved.restore()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=CHANGES)
def test_states_that_make_no_sense(folder: Path, changes: list[tuple[int, int, int]]) -> None:
    restore(folder, changes)


@pytest.mark.long
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=CHANGES)
def test_many_states_that_make_no_sense(folder: Path, changes: list[tuple[int, int, int]]) -> None:
    restore(folder, changes)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=CHANGES)
def test_mutated_files(kind: str, folder: Path, changes: list[tuple[int, int, int]]) -> None:
    load(kind, folder, changes)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2000, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(changes=CHANGES)
def test_many_mutated_files(kind: str, folder: Path, changes: list[tuple[int, int, int]]) -> None:
    load(kind, folder, changes)
