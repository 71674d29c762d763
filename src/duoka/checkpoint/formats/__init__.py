"""The file formats of weights: one module per format, and a table of them.

Each module has `matches(path)`, which examines the content, not the name, and `read(path, objects)`, which returns
names, types and shapes without reading the tensors' data.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, cast

from duoka.checkpoint.contents import FileContents
from duoka.errors import OptionError, WeightsError

# Treatment of objects in a pickle that are neither tensors nor plain values: refuse the file, or read them as inert
# stand-ins. In no case does their code run.
Objects = Literal["refuse", "inert"]

FORMATS = (
    "duoka.checkpoint.formats.directory",
    "duoka.checkpoint.formats.dcp",
    "duoka.checkpoint.formats.sharded",
    "duoka.checkpoint.formats.safetensors",  # before pickles: a header's length can begin with a pickle's first byte
    "duoka.checkpoint.formats.pickles",
)


class Format(Protocol):
    """The interface of a format's module."""

    def matches(self, path: Path) -> bool:
        """Return True for a file or directory of this format."""

    def read(self, path: Path, objects: Objects) -> FileContents:
        """Read the contents; raises WeightsError."""


def read(path: str | Path, objects: Objects = "refuse") -> FileContents:
    """Read the contents of a file or directory of any supported format.

    objects: "refuse" rejects pickles that contain objects of unknown classes; "inert" reads them with stand-ins that
    run no code.

    Raises:
        OptionError: `objects` has another value.
        WeightsError: the file does not exist, has an unknown format, or is damaged.
        UnsafePickle: the pickle would run code.
    """
    if objects not in ("refuse", "inert"):
        raise OptionError("objects", objects, "'refuse' or 'inert'")
    path = Path(path)
    try:
        if not path.exists() and path.with_name(f"{path.name}.index.json").is_file():
            path = path.with_name(f"{path.name}.index.json")
        if not path.exists():
            raise WeightsError(f"there is no file {str(path)!r}{_near(path)}")
        for name in FORMATS:
            one = cast(Format, import_module(name))
            if one.matches(path):
                return one.read(path, objects)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise WeightsError(f"{path} cannot be read: {error}") from error
    raise WeightsError(_unknown(path))


def _near(path: Path) -> str:
    """Suggest a similar file name."""
    from difflib import get_close_matches

    if not path.parent.is_dir():
        return f": there is no directory {str(path.parent)!r} either"
    close = get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    return f"; did you mean {str(path.parent / close[0])!r}?" if close else ""


def _unknown(path: Path) -> str:
    known = "safetensors, torch.save's files, sharded files with an index, DCP directories, duoka checkpoints"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        return f"{path} holds no weights in a format that duoka knows ({listed or 'it is empty'}); it reads {known}"
    if path.stat().st_size == 0:
        return f"{path} is empty (0 bytes): its writing was cut short, or the disk was full"
    with open(path, "rb") as file:
        head = file.read(200)
    if head.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the file itself; get that by `git lfs pull`"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return f"{path} is a web page, not weights: the download went wrong"
    if head.startswith(b"\x89HDF"):
        return f"{path} is an HDF5 file (Keras), which duoka does not read; it reads {known}"
    return f"{path} has no format that duoka knows (it begins with {head[:8]!r}); it reads {known}"
