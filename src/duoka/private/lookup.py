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


TESTED = {"torch": "2.10 to 2.15", "Python": "3.10 to 3.13"}
