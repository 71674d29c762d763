"""Load the model and the data named on the command line of `duoka predict`."""

from __future__ import annotations

import inspect
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
READ = (".npy", ".pt", *IMAGES)
MODEL = "a torch.nn.Module, or a function without arguments that returns one"
FILES = f"a .npy file, or a folder of .npy, .pt or image files ({', '.join(IMAGES)})"


def import_name(option: str, name: str) -> Any:
    """Import `package.module:name`; the working directory is on the path, as with `python -m`.

    Raises:
        OptionError: the module or name does not exist.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(option, name, "written as module:name, for example nets:make")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        hint = f"write {module.removesuffix('.py')}:{attribute}" if module.endswith(".py") else ""
        raise OptionError(option, name, f"in a module that can be imported; there is no {module}", hint) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(option, name, f"the name of something in it; {module} has no {attribute}")
        found = getattr(found, part)
    return found


def model_named(name: str) -> nn.Module:
    """Return the model at `module:name`, calling it if it is a function without arguments.

    Raises:
        OptionError: it is not a model and returns none.
    """
    found = import_name("MODEL", name)
    if not isinstance(found, nn.Module) and callable(found) and _needs_arguments(found):
        raise OptionError(
            "MODEL", name, MODEL, "it needs arguments: write a function without arguments that calls it"
        )
    model = found if isinstance(found, nn.Module) else found() if callable(found) else None
    if not isinstance(model, nn.Module):
        raise OptionError("MODEL", name, MODEL, f"it returns {type(model).__name__}" if callable(found) else "")
    return model


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # some built-in functions have no signature
        return False
    return False


class Files(Sequence[Any]):
    """The items in a folder's files, in the order of their names, read on access."""

    def __init__(self, paths: Sequence[Path], read: Callable[[Path], Any]) -> None:
        self.paths, self._read = paths, read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        return Files(self.paths[index], self._read) if isinstance(index, slice) else self._read(self.paths[index])


def open_data(path: Path, read: Callable[[Path], Any] | None = None) -> Any:
    """Open a .npy file as a memory map of rows, or a folder as a sequence of items.

    Raises:
        OptionError: it is neither, or is empty.
    """
    if path.is_dir():
        paths = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        if not paths:
            raise OptionError("--data", str(path), FILES, "this folder is empty")
        strange = next((one for one in paths if one.suffix.lower() not in READ), None)
        if strange is not None and read is None:
            raise OptionError("--data", str(strange), FILES, "--read module:function reads other files")
        return Files(paths, read or read_file)
    if path.suffix != ".npy" or not path.is_file():
        raise OptionError("--data", str(path), FILES, "" if path.exists() else "it is not there")
    try:
        rows = numpy.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError) as error:
        raise OptionError("--data", str(path), FILES, f"it cannot be read as one: {error}") from None
    if rows.ndim == 0 or len(rows) == 0:
        raise OptionError("--data", str(path), FILES, "this array has no rows")
    if rows.dtype.kind not in "biufc":
        raise OptionError("--data", str(path), FILES, f"this array is of {rows.dtype}, which are not numbers")
    return rows


def check_kind(data: Any, path: Path, model: nn.Module) -> None:
    """Check that an array is not float64 (numpy's default) for a model of float32 (torch's default).

    Raises:
        OptionError: it is.
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if isinstance(data, numpy.ndarray) and data.dtype == numpy.float64 and torch.float32 in kinds:
        hint = "numpy.save(path, array.astype('float32'))"
        raise OptionError("--data", str(path), "an array of float32, as the model's weights are", f"float64: {hint}")


def read_file(path: Path) -> Any:
    """Read one item: an array, a torch.save file, or an image as floats in 0 to 1 of shape [3, height, width].

    Raises:
        OptionError: the format is unknown, or Pillow is missing.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    if suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    try:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]  # not a dependency
    except ImportError:
        raise OptionError("--data", str(path), "without images, as Pillow is missing", "pip install pillow") from None
    with Image.open(path) as image:
        pixels = numpy.asarray(image.convert("RGB"), dtype=numpy.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)
