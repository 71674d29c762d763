"""Tell the files of the user's code from those of Python, of libraries and of duoka."""

from __future__ import annotations

import sysconfig
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

_OURS = str(Path(__file__).parents[1])
_INSTALLED = ("/site-packages/", "/dist-packages/")  # of this environment, of the user, or of the system below it
_PATHS = sysconfig.get_paths()
_STANDARD = (_PATHS["stdlib"], _PATHS["platstdlib"], "<")  # "<": code generated at run time, as by dataclasses
_TYPED = ("<stdin>", "<ipython")
_COMMAND = "/bin/duoka"  # installed beside Python, for the user, or elsewhere


@lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Return True for a file of Python's standard library, whose folder may contain site-packages."""
    return filename.startswith(_STANDARD) and not filename.startswith(_TYPED) and not is_installed(filename)


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Return True for a file that belongs neither to Python, nor to a library, nor to duoka."""
    return not is_installed(filename) and not is_standard(filename)


def is_installed(filename: str) -> bool:
    """Return True for a file of a library or of duoka."""
    if filename.startswith((_torch(), _OURS)) or filename.endswith(_COMMAND):
        return True
    return any(site in filename for site in _INSTALLED)


@cache
def _torch() -> str:
    """Return the folder of torch, which may be a checkout, without importing it."""
    spec = find_spec("torch")
    return _OURS if spec is None or spec.origin is None else str(Path(spec.origin).parent)
