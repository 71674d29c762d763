"""Run a script or a module as the main program, as the interpreter does."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from io import BytesIO
from types import CodeType, ModuleType

from duoka.errors import ScriptError
from duoka.script.files import STANDARD_INPUT, TYPED, Target, standard_input


def run_target(target: Target, first_args: Sequence[str] = ()) -> None:
    """Run `target` as `__main__`; its exceptions pass through.

    Its module stays `sys.modules["__main__"]`, for its threads, its atexit functions and pickle.

    Args:
        target: the script or module.
        first_args: arguments put before the target's own.

    Raises:
        ScriptError: the script or module does not exist, or cannot be read.
    """
    name, args = target.name, [*first_args, *target.args]
    if target.is_module:
        _run_module(name, args)
        return
    path = TYPED if name == STANDARD_INPUT else os.path.join(os.getcwd(), name)
    try:
        with BytesIO(standard_input()) if path == TYPED else open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        raise ScriptError(f"the script {name} cannot be read: {error.strerror}") from None
    sys.argv[:] = [name, *args]
    _search_first("" if path == TYPED else os.path.dirname(os.path.realpath(path)))
    main = _new_main(path, SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, args: Sequence[str]) -> None:
    sys.argv[:] = ["-m", *args]  # what python shows while it imports the packages above the module
    _search_first(os.getcwd())
    spec, code = _module_code(name)
    assert spec.origin is not None
    sys.argv[0] = spec.origin
    main = _new_main(spec.origin, spec.loader)
    main.__spec__, main.__package__, main.__cached__ = spec, spec.parent, spec.cached  # type: ignore[attr-defined]
    exec(code, main.__dict__)


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Find a module as `python -m` does: for a package, its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a parent package exists, but a module that it imports does not
        spec = None
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(name) if get_code else None
    if spec is None or not spec.has_location or code is None:
        raise ScriptError(f"there is no module {name} that could be run; its parents must be packages")
    return spec, code


def _search_first(folder: str) -> None:
    """Replace the folder of duoka's command in sys.path by the program's."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _new_main(path: str, loader: object) -> ModuleType:
    """Create a `__main__` module with the names that the interpreter sets."""
    main = ModuleType("__main__")
    main.__file__ = path
    main.__dict__.update(__builtins__=builtins, __loader__=loader, __cached__=None)
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063  created here
    sys.modules["__main__"] = main
    return main
