"""Whose code runs: a file's owner, and the running line of the user's script; functions called after an import."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from greenlet import getcurrent

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


# Running code.


def is_users_frame(frame: FrameType) -> bool:
    """Return True if a frame runs the user's code, and not code that a library generated into a file."""
    return is_users(frame.f_code.co_filename) and not _is_library_module(frame.f_globals.get("__name__") or "")


@lru_cache(maxsize=4096)
def _is_library_module(name: str) -> bool:
    package, _, rest = name.partition(".")
    file = getattr(sys.modules.get(package), "__file__", None) if rest else None
    return isinstance(file, str) and is_installed(file)


def outer_frames(innermost: FrameType) -> Iterator[FrameType]:
    """Yield this frame of the running thread and those that led to it, from the inside out."""
    frame: FrameType | None = innermost
    turn = getcurrent()
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None and turn.parent is not None:  # in the greenlet of a share: continue in its parent
            turn = turn.parent
            frame = turn.gr_frame


def user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None in a thread without one (torch's backward threads)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # `outer_frames`, without a generator: this runs for each collective
        if is_users(frame.f_code.co_filename) and is_users_frame(frame):
            return frame
        outermost, frame = frame, frame.f_back
    return next(filter(is_users_frame, outer_frames(outermost)), None)


def is_called_by(functions: Collection[CodeType]) -> bool:
    """Return True if one of these functions is running."""
    return any(frame.f_code in functions for frame in outer_frames(sys._getframe(1)))


def user_line() -> str:
    """Return `train.py:41`, or `?` if no frame is the user's."""
    frame = user_frame()
    return "?" if frame is None else f"{_basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(maxsize=4096)
def _basename(filename: str) -> str:
    return Path(filename).name


# After an import.


def after_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call a function with a module once it is imported, at once if it is already.

    Exceptions that the function raises later are ignored: the script that imports the module must not see them.
    """
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaited(name, function))  # before the finder that would find it


class _Awaited(MetaPathFinder):
    """Finds no module, but lets the loader of one call a function at its end. Removes itself."""

    def __init__(self, name: str, function: Callable[[ModuleType], object]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        with suppress(ValueError):  # another thread imports it, too
            sys.meta_path.remove(self)
        spec = find_spec(name)  # by the other finders
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return None

        def execute_and_call(module: ModuleType) -> None:
            with suppress(AttributeError):  # the module may look at its loader, which is as it was
                del spec.loader.exec_module  # type: ignore[union-attr]
            execute(module)
            with suppress(Exception):  # the script must not see it
                self._function(module)

        with suppress(AttributeError):
            spec.loader.exec_module = execute_and_call  # type: ignore[union-attr, method-assign]
        return spec
