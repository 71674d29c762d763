"""The script to run: found and parsed with the local files that it imports, without running them; and run.

It runs as the main program, as by the interpreter.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.util
import os
import pkgutil
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from io import BytesIO
from pathlib import Path
from types import CodeType, ModuleType

from duoka.errors import ScriptError

STANDARD_INPUT = "-"  # in place of a script's name, as for Python
TYPED = "<stdin>"  # Python's file name of such a script
MOST_FILES = 500  # the nearest first; further files of a large program are not read


@dataclass(frozen=True, slots=True)
class Target:
    """The script to run: its path, or with `is_module` a module's dotted name."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file."""

    tree: ast.Module
    shown: str  # its name in messages
    digest: str  # SHA-256 of its content


@dataclass(frozen=True, slots=True)
class Location:
    """Files of a target."""

    file: Path  # the file to run
    base: Path  # the folder where its absolute imports start
    home: Path  # the folder of its own files, or the file itself if it has none


@cache
def standard_input() -> bytes:
    """Read the script from standard input; the script itself then finds it at its end, as under `python -`.

    The text is kept in memory as the new standard input, so that this command can read it again if it restarts
    itself.
    """
    source = sys.stdin.buffer.read() if sys.stdin is not None else b""
    with os.fdopen(os.memfd_create("duoka-script"), "wb", closefd=True) as kept:
        kept.write(source)
        kept.flush()
        os.dup2(kept.fileno(), 0)  # at its end, as the position is shared
    return source


def sources(target: Target) -> Iterator[Source]:
    """Yield the target's own file, then the local files that it imports, nearest first.

    Files that do not parse are skipped. Raises ScriptError if the script or module does not exist or cannot be read.
    """
    location = find(target)
    waiting, known = deque([location.file]), {location.file}
    while waiting:
        path = waiting.popleft()
        data, tree = _parse(path)
        if tree is None:
            continue
        shown = path.relative_to(location.base) if path.is_relative_to(location.base) else path
        yield Source(tree, str(shown), hashlib.sha256(data).hexdigest())
        for file in _imported(tree, path.parent, location.base):
            if file not in known and len(known) < MOST_FILES and _is_own(file, location.home):
                known.add(file)
                waiting.append(file)


def find(target: Target) -> Location:
    """Return the files of a target. Raises ScriptError if the script or module does not exist or cannot be read."""
    location = _module(target.name) if target.is_module else _script(target.name)
    try:
        if location.file.name != TYPED:
            location.file.open("rb").close()
    except OSError as error:
        raise ScriptError(f"{location.file} cannot be read: {error.strerror}") from None
    return location


def _script(name: str) -> Location:
    if name == STANDARD_INPUT:
        here = Path.cwd().resolve()
        return Location(here / TYPED, here, here)
    path = Path(name)
    if path.is_dir():
        raise ScriptError(f"{name!r} is a directory, and a script must be a file; to run a package write -m package")
    if not path.exists():
        raise ScriptError(f"there is no script {name!r}{_nearest_file(path)}")
    if not path.is_file():
        hint = "duoka run - takes one from standard input"
        raise ScriptError(f"{name!r} is a pipe or a device, and a script must be a file, to be read twice; {hint}")
    path = path.resolve()  # as the interpreter, which imports from the folder that a link points to
    return Location(path, path.parent, path.parent)


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no directory {str(path.parent)!r}"
    scripts = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    close = get_close_matches(path.name, scripts, n=1) or get_close_matches(f"{path.name}.py", scripts, n=1)
    if close:
        return f"; did you mean {str(path.parent / close[0])!r}?"
    return "; to run a module write -m" if _is_dotted(str(path)) and any(_locate(str(path))) else ""


def _module(name: str) -> Location:
    """Find a module as `python -m` does, but without running its parent packages."""
    if not _is_dotted(name):
        hint = "; to run a file leave -m out" if Path(name).exists() else ""
        raise ScriptError(f"-m takes a module's name like package.module, and {name!r} is none{hint}")
    file, folders = _locate(name)
    if file is None and not folders:
        raise ScriptError(f"there is no module {name!r}{_nearest_module(name)}")
    if folders:
        file, _ = _find(list(map(str, folders)), "__main__")
        if file is None:
            raise ScriptError(f"{name!r} is a package without __main__.py, which cannot be run")
    assert file is not None
    return _module_files(file.resolve(), name)


def _module_files(file: Path, name: str) -> Location:
    """Return the files of a module: in the working directory, that is its home; elsewhere its package is."""
    here = Path.cwd().resolve()
    if file.is_relative_to(here) and _is_own(file, here):
        return Location(file, here, here)
    package = next((folder for folder in file.parents if folder.name == name.partition(".")[0]), None)
    return Location(file, package.parent if package else file.parent, package or file)


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _locate(name: str) -> tuple[Path | None, list[Path]]:
    """Return the file of a dotted name, if any, and the folders of its submodules.

    They are found as by an import, but a submodule is looked for in the folders of its package, which does not run.
    """
    file, folders = _find([os.getcwd(), *sys.path], name.partition(".")[0], importlib.util.find_spec)
    for part in name.split(".")[1:]:
        file, folders = _find(folders, part)
    return file, list(map(Path, folders))


def _find(
    folders: list[str], name: str, otherwise: Callable[[str], ModuleSpec | None] = lambda name: None
) -> tuple[Path | None, list[str]]:
    """Return the file of a module in these folders, if it has one, and the folders of its submodules.

    otherwise: finds what is in none of them, such as a package whose installation is a hook of imports.
    """
    try:
        spec = PathFinder.find_spec(name, folders) or otherwise(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None, []
    is_source = spec.has_location and spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)) if is_source else None, [*(spec.submodule_search_locations or ())]


def _nearest_module(name: str) -> str:
    parent, _, last = name.rpartition(".")
    if last == "py":
        return "; to run a file leave -m out"
    folders = _locate(parent)[1] if parent else [Path.cwd()]
    if not folders:
        return f": there is no package {parent!r}"
    close = get_close_matches(last, [module.name for module in pkgutil.iter_modules(map(str, folders))], n=1)
    return f"; did you mean {'.'.join(filter(None, [parent, close[0]]))!r}?" if close else ""


def _parse(path: Path) -> tuple[bytes, ast.Module | None]:
    """Return the content of a file and its syntax tree, None if it does not parse."""
    data = b""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python shows them when the file is run
        try:
            data = standard_input() if path.name == TYPED else path.read_bytes()
            return data, ast.parse(data, str(path))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return data, None


def _imported(tree: ast.Module, folder: Path, base: Path) -> Iterator[Path]:
    """Yield the files that the imports of a file in `folder` may name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(base, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = [folder, *folder.parents][node.level - 1] if node.level else base
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files(start, [*module, alias.name])


def _files(start: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the parent packages of a dotted name, and its own file."""
    for count in range(len(parts) + 1):
        path = start.joinpath(*parts[:count])
        for candidate in (path / "__init__.py", path.with_suffix(".py") if count else path):
            if candidate.is_file():
                yield candidate.resolve()


def _is_own(path: Path, home: Path) -> bool:
    if not path.is_relative_to(home):
        return False
    return not {"site-packages", "dist-packages"} & set(path.relative_to(home).parts)


# Running it.


def run_target(target: Target, first_args: Sequence[str] = ()) -> None:
    """Run `target` as `__main__`; its exceptions pass through.

    Its module stays `sys.modules["__main__"]`, for its threads, its atexit functions and pickle. first_args: put
    before the target's own. Raises ScriptError if the script or module does not exist, or cannot be read.
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
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # not to inherit `annotations` from here


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
            raise  # of a module that a parent package imports: the script's own error
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
    sys.modules["__main__"] = main  # before the script runs, which may pickle, or start processes, by this name
    return main
