"""What `duoka predict` names on its command line: the model, the data, and the file of outputs.

Outputs are written to `NAME.part`, which is renamed when complete and can be resumed. `NAME.part.json` records the
progress, always after the outputs themselves are written.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import nn

from duoka.errors import OptionError, RunError
from duoka.system import disk

IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
READ = (".npy", ".pt", *IMAGES)
MODEL = "a torch.nn.Module, or a function without arguments that returns one"
FILES = f"a .npy file, or a folder of .npy, .pt or image files ({', '.join(IMAGES)})"
BETWEEN_NOTES = 1.0  # seconds between two records of the progress


def import_name(option: str, name: str) -> Any:
    """Import `package.module:name`; the working directory is on the path, as with `python -m`.

    Raises OptionError if the module or name does not exist.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(option, name, "written as module:name, for example nets:make")
    if os.getcwd() not in sys.path and "" not in sys.path:  # "" is the working directory
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # a module that this one imports is missing
        hint = f"write {module.removesuffix('.py')}:{attribute}" if module.endswith(".py") else ""
        raise OptionError(option, name, f"in a module that can be imported; there is no {module}", hint) from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise OptionError(option, name, f"the name of something in it; {module} has no {attribute}")
        value = getattr(value, part)
    return value


def model_named(name: str) -> nn.Module:
    """Return the model at `module:name`, calling it if it is a function without arguments.

    Raises OptionError if it is not a model and returns none.
    """
    model = import_name("MODEL", name)
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise OptionError("MODEL", name, MODEL)
    try:
        inspect.signature(model).bind()
    except TypeError:
        hint = "it needs arguments: write a function without arguments that calls it"
        raise OptionError("MODEL", name, MODEL, hint) from None
    except ValueError:  # some built-in functions have no signature
        pass
    made = model()
    if not isinstance(made, nn.Module):
        raise OptionError("MODEL", name, MODEL, f"it returns {type(made).__name__}")
    return made


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

    Raises OptionError if it is neither, or is empty.
    """
    if path.is_dir():
        paths = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not paths:
            raise OptionError("--data", str(path), FILES, "this folder is empty")
        strange = next((file for file in paths if file.suffix.lower() not in READ), None)
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

    Raises OptionError if it is.
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if isinstance(data, numpy.ndarray) and data.dtype == numpy.float64 and torch.float32 in kinds:
        hint = "numpy.save(path, array.astype('float32'))"
        raise OptionError("--data", str(path), "an array of float32, as the model's weights are", f"float64: {hint}")


def read_file(path: Path) -> Any:
    """Read one item: an array, a torch.save file, or an image as floats in 0 to 1 of shape [3, height, width].

    Raises OptionError if the format is unknown, or Pillow is missing.
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


# Outputs.


class Writer(ABC):
    """Appends the outputs of items 0, 1, 2, … of `total` to a file. done: number written.

    facts: values that must be unchanged to resume: the model, its weights, the data. Raises OptionError if the file
    exists already, or the unfinished part was made with other facts.
    """

    def __init__(self, path: Path, total: int, facts: Mapping[str, Any], resume: bool) -> None:
        self.path, self.total, self.facts = path, total, {**facts, "total": total}
        self.part, self.note = Path(f"{path}.part"), Path(f"{path}.part.json")
        self.done = 0
        self._end = 0  # of the last complete outputs in the file, in bytes
        self._file: IO[bytes] | None = None
        self._noted = time.monotonic()
        if path.exists():
            raise OptionError("--out", str(path), "a new file; remove it, or choose another name")
        if self.note.exists() and self.part.exists():
            self._resume(json.loads(self.note.read_text()), resume)
        elif not path.absolute().parent.is_dir():
            raise OptionError("--out", str(path), "a file in an existing folder")
        elif not os.access(path.absolute().parent, os.W_OK):
            raise OptionError("--out", str(path), "a file in a writable folder")

    def _resume(self, noted: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            total = noted["facts"]["total"]
            hint = f"{noted['done']:,} of {total:,} are in {self.part}: go on with --resume, or remove both"
            raise OptionError("--out", str(self.path), "a file without an unfinished part", hint)
        changed = [name for name, fact in self.facts.items() if noted["facts"].get(name) != fact]
        if changed:
            made_of = f"made of the same {', '.join(changed)}"
            raise OptionError("--resume", str(self.part), made_of, "remove it to begin anew")
        self.done, self._end = noted["done"], noted["bytes"]
        self._file = self.part.open("r+b")
        self._file.seek(self._end)  # what was written after the note is written again

    def write(self, outputs: Sequence[Any]) -> None:
        """Write the outputs of the next items. Raises RunError if the disk is full, or fails."""
        try:
            self._file = self._file or self.part.open("w+b")
            for index, output in enumerate(outputs, self.done):
                self._file.write(self._encoded(self._file, index, output))
        except OSError as error:
            raise RunError(f"{self.part} cannot be written: {error.strerror or error}") from error
        self.done, self._end = self.done + len(outputs), self._file.tell()
        if time.monotonic() - self._noted > BETWEEN_NOTES:
            self.keep()

    def keep(self) -> None:
        """Flush the outputs to the disk, and record the progress, so that an unfinished file can be resumed."""
        if self._file is None or not self.done:
            return
        self._file.flush()
        os.fsync(self._file.fileno())  # before the note, which must not count outputs that a crash takes away
        note = {"done": self.done, "facts": self.facts, "bytes": self._end}
        disk.replace_by(self.note, json.dumps(note).encode())
        self._noted = time.monotonic()

    def finish(self) -> None:
        """Rename the complete file to its final name."""
        self.write([])  # opens the file if no output came
        assert self._file is not None
        self._file.truncate()  # of an earlier try, that wrote more after its last note
        self.keep()
        self.close()
        disk.put(self.part, self.path)
        self.note.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    @abstractmethod
    def _encoded(self, file: IO[bytes], index: int, output: Any) -> bytes:
        """Return the bytes of an output, at the end of the file."""


class NpyWriter(Writer):
    """Writes a .npy file: one array with a row for each item."""

    _row: Any = None  # an array like each row

    def _encoded(self, file: IO[bytes], index: int, output: Any) -> bytes:
        row = _array(output, self.path)
        if self._row is None and index:
            self._row = numpy.lib.format.open_memmap(self.part, mode="r")[0]
        elif self._row is None:
            kind = {"descr": row.dtype.str, "fortran_order": False, "shape": (self.total, *row.shape)}
            numpy.lib.format.write_array_header_1_0(file, kind)
            os.posix_fallocate(file.fileno(), 0, file.tell() + self.total * row.nbytes)  # a full disk ends it now
            self._row = row
        if row.shape != self._row.shape:
            shapes = f"item {index:,} gives {row.shape} after {self._row.shape}"
            raise OptionError("--out", str(self.path), f"a .jsonl file, as outputs differ in shape: {shapes}")
        encoded: bytes = row.astype(self._row.dtype).tobytes()
        return encoded


class JsonlWriter(Writer):
    """Writes a line of JSON for each item: {"index": 0, "output": ...}."""

    def _encoded(self, file: IO[bytes], index: int, output: Any) -> bytes:
        return (json.dumps({"index": index, "output": _plain(output)}) + "\n").encode()


WRITERS: dict[str, type[Writer]] = {".jsonl": JsonlWriter, ".npy": NpyWriter}


def writer(path: Path, total: int, facts: Mapping[str, Any], resume: bool) -> Writer:
    """Create the writer for `path`, by its suffix.

    Raises OptionError if the suffix is unknown, or the file cannot be created or resumed.
    """
    if path.suffix not in WRITERS:
        raise OptionError("--out", str(path), f"a name that ends in {' or '.join(WRITERS)}")
    return WRITERS[path.suffix](path, total, facts, resume)


def _array(output: Any, path: Path) -> Any:
    if isinstance(output, torch.Tensor):
        return (output.float() if output.dtype is torch.bfloat16 else output).numpy()
    if isinstance(output, (int, float)):
        return numpy.asarray(output)
    raise OptionError("--out", str(path), f"a .jsonl file, as an output is a {type(output).__name__}")


def _plain(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.tolist()
    if isinstance(output, Mapping):
        return {str(key): _plain(value) for key, value in output.items()}
    return [_plain(value) for value in output] if isinstance(output, (tuple, list)) else output
