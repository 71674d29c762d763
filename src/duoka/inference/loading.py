"""What `duoka predict` is given by name: a model, and data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from duoka.errors import OptionError

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FILES = f"a .npy file, or a folder of .npy, .pt or image files ({', '.join(IMAGES)})"


def named(option: str, name: str) -> Any:
    """What `package.module:name` is; modules beside the caller are found, as by `python -m`.

    Raises:
        OptionError: there is no such thing.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(option, name, "written as module:name, for example nets:make")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise OptionError(option, name, f"in a module that can be imported; there is no {error.name}") from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(option, name, f"the name of something in it; {module} has no {attribute}")
        found = getattr(found, part)
    return found


def model_named(name: str) -> nn.Module:
    """The model that `module:name` is, or gives when it is called without arguments.

    Raises:
        OptionError: it is or gives no model.
    """
    found = named("MODEL", name)
    model = found if isinstance(found, nn.Module) else found() if callable(found) else None
    if not isinstance(model, nn.Module):
        raise OptionError("MODEL", name, "a torch.nn.Module, or a function without arguments that returns one")
    return model


class Files(Sequence[Any]):
    """The items of a folder's files, in the order of their names, read when they are asked for."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Path], Any]) -> None:
        self.paths, self._read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        return Files(self.paths[index], self._read) if isinstance(index, slice) else self._read(self.paths[index])


def open_data(path: Path, read: Callable[[Path], Any] | None = None) -> Any:
    """The rows of a .npy file, which is not read into memory, or the files of a folder as items.

    Raises:
        OptionError: it is neither, or has nothing in it.
    """
    if path.is_dir():
        paths = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        if not paths:
            raise OptionError("--data", str(path), FILES, "this folder is empty")
        return Files(paths, read or read_file)
    if path.suffix != ".npy" or not path.is_file():
        raise OptionError("--data", str(path), FILES, "" if path.exists() else "it is not there")
    try:
        rows = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise OptionError("--data", str(path), FILES, str(error)) from None
    if rows.ndim == 0:
        raise OptionError("--data", str(path), FILES, "this array has no rows")
    return rows


def read_file(path: Path) -> Any:
    """One item: an array, what torch.save wrote, or an image as floats from 0 to 1 of shape [3, height, width].

    Raises:
        OptionError: it is none of these, or the library that reads images is missing.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    if suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    if suffix not in IMAGES:
        raise OptionError("--data", str(path), FILES, "--read module:function reads other files")
    try:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]  # not a dependency
    except ImportError:
        raise OptionError("--data", str(path), "without images, as Pillow is missing", "pip install pillow") from None
    with Image.open(path) as image:
        pixels = numpy.asarray(image.convert("RGB"), dtype=numpy.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)
