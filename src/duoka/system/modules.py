"""Python's modules: whose a file of code is; functions called after an import; imports without random draws."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

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


def after_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call a function with a module once it is imported, at once if it is already.

    Exceptions that the function raises later are ignored: the script that imports the module must not see them.
    """
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaited(name, function))


class _Awaited(MetaPathFinder):
    """Finds no module, but lets the loader of one call a function at its end. Removes itself."""

    def __init__(self, name: str, function: Callable[[ModuleType], object]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that the other finders find for the awaited module."""
        if name != self._name:
            return None
        with suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return None

        def execute_and_call(module: ModuleType) -> None:
            with suppress(AttributeError):
                del spec.loader.exec_module  # type: ignore[union-attr]
            execute(module)
            with suppress(Exception):  # the script must not see it
                self._function(module)

        with suppress(AttributeError):
            spec.loader.exec_module = execute_and_call  # type: ignore[union-attr, method-assign]
        return spec
