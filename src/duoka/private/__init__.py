"""Private and undocumented parts of torch and Python that duoka needs. No other file names one.

python.py   of Python and multiprocessing
torch.py    of torch
light.py    of torch, without importing more than `import torch` does
texts.py    error messages of torch, gloo and GPUs by which duoka distinguishes errors; imports neither

A part that is missing in a new version of torch or Python is noticed when these files are imported, and reported by
`requiring`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from duoka.errors import VersionError


@contextmanager
def requiring(name: str, version: str) -> Iterator[None]:
    """Convert errors within to one that names the versions of duoka and of `name`.

    Raises:
        VersionError: for any exception within.
    """
    try:
        yield
    except Exception as error:
        ours = sys.modules["duoka"].__version__
        raise VersionError(
            f"duoka {ours} does not work with {name} {version} (Python {platform.python_version()}), "
            f"of which it uses a part that is missing or has changed: {error}; install a newer duoka, or a "
            f"version of {name} that it is tested with: {TESTED[name]}"
        ) from error


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version, by which releases of torch and Python differ."""
    first, second = version.split("+")[0].split(".")[:2]
    return int(first), int(second)


# Versions with which the tests were run (docs/versions.md).
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 15)
TESTED = {"torch": f"{_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}", "Python": "3.10 to 3.14"}


def untested(torch: str) -> list[str]:
    """Return a line for the header of a run if this version of torch is newer than all tested ones."""
    if numbers(torch) <= NEWEST_TORCH:
        return []
    return [
        f"torch {torch} is newer than {_text(NEWEST_TORCH)}, the newest that this version of duoka is tested with"
    ]
