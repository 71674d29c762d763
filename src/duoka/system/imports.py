"""Imports: functions that are called after one, and imports that leave random numbers as they are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call a function with a module once it is imported, at once if it is already.

    Exceptions that the function raises later are ignored: the script that imports the module must not see them.
    """
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Awaited(name, function))


@contextmanager
def without_draws() -> Iterator[None]:
    """Within the context, keep the state of `random`, from which some libraries draw when they are imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


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
