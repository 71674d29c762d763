"""What is raised where a private part is not what it was."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from duoka.errors import VersionError


@contextmanager
def parts_of(name: str, version: str) -> Iterator[None]:
    """Name duoka's version, and that of what is looked into, where a part of it is missing or has changed.

    Raises:
        VersionError: for whatever goes wrong within.
    """
    try:
        yield
    except Exception as error:
        own = sys.modules["duoka"].__version__
        raise VersionError(
            f"duoka {own} does not work with {name} {version} (Python {platform.python_version()}), "
            f"of which it uses a part that is not there, or has changed: {error}; install a newer duoka, or a "
            f"version of {name} that it is tested with: {TESTED[name]}"
        ) from error


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version, which tell torch's and Python's releases apart."""
    first, second = version.split("+")[0].split(".")[:2]
    return int(first), int(second)


# What the tests were run with, from the oldest to the newest (docs/versions.md).
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 15)
TESTED = {"torch": f"{_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}", "Python": "3.10 to 3.14"}


def untested(torch: str) -> list[str]:
    """A line for the header of a run, where this version of torch is newer than all that the tests were run with."""
    if numbers(torch) <= NEWEST_TORCH:
        return []
    return [
        f"torch {torch} is newer than {_text(NEWEST_TORCH)}, the newest that this version of duoka is tested with"
    ]
