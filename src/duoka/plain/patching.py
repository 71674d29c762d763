"""Replace functions of torch and Python for the time of a run, in classes written in C too."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from duoka.errors import Refused
from duoka.private.torch import LAZY_METHODS
from duoka.system.user_code import is_users

F = TypeVar("F", bound=Callable[..., Any])


class Methods:
    """The methods of `kind`, set in the class itself: its instances would not use those of a replacement class."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        return self.kind.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        (methods,) = gc.get_referents(self.kind.__dict__)
        methods[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self.kind))


def stand_in(original: type, make: Callable[..., Any], *others: type) -> type:
    """Return a class to be put in place of another, of which `make` creates the instances, also those of `others`.

    Its subclasses are the script's own.
    """

    class Made(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (original, *others)) if cls is made else super().__instancecheck__(value)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs) if cls is made else super().__call__(*args, **kwargs)

    made = Made(original.__name__, (original,), {"__module__": original.__module__, "__doc__": original.__doc__})
    return made


class _Here(threading.local):
    """Switches of one thread, as another thread may read batches ahead meanwhile."""

    rank_local = False


class Patches:
    """The replaced functions of a run, and their originals.

    refused: is called with what a replacement raises to refuse, as the script may catch it.
    Child processes (loader workers) start without replacements.
    """

    def __init__(self) -> None:
        self._installed = True
        self._here = _Here()
        self._undo: list[tuple[Any, str, Any]] = []
        self._at_end: list[Callable[[], None]] = []
        self.refused: Callable[[Refused], None] = lambda refusal: None
        os.register_at_fork(after_in_child=self.undo)

    def around(self, space: Any, *names: str) -> Callable[[F], F]:
        """Decorate a function to be called in place of these of `space`: `function(original, ...)`."""

        def decorate(function: F) -> F:
            for name in names:
                self.replace(space, name, lambda original: self._noting(functools.partial(function, original)))
            return function

        return decorate

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            try:
                return function(*args, **how)
            except Refused as refusal:
                self.refused(refusal)
                raise

        return call

    def replace(self, space: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function `space.name` by `make(original)`, which calls `original`."""
        original = getattr(space, name)
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        if original in LAZY_METHODS:
            LAZY_METHODS.append(replacement)
            self.at_end(lambda: LAZY_METHODS.remove(replacement))
        self.put(space, name, replacement)

    def put(self, space: Any, name: str, value: Any) -> None:
        """Set `space.name` to `value`."""
        as_defined = getattr(space, "__dict__", {})  # getattr on a class would bind a classmethod
        self._undo.append((space, name, as_defined[name] if name in as_defined else getattr(space, name)))
        setattr(space, name, value)

    @contextmanager
    def functions_put_back(self) -> Iterator[None]:
        """Within the context, restore torch's functions: TorchScript recognises them by identity."""
        theirs = [
            (space, name, original)
            for space, name, original in self._undo
            if isinstance(space, ModuleType) and space.__name__.partition(".")[0] == "torch"
        ]
        ours = [(space, name, getattr(space, name)) for space, name, _ in theirs]
        for space, name, original in reversed(theirs):
            setattr(space, name, original)
        try:
            yield
        finally:
            for space, name, replacement in ours:
                setattr(space, name, replacement)

    def made(self) -> list[tuple[Any, str, Any]]:
        """Return all replacements, in order, to be set again in a child process."""
        return [(space, name, getattr(space, name)) for space, name, _ in self._undo]

    def reach(self) -> None:
        """Replace functions also in modules of the script that imported them before (`from … import …`)."""
        put = {id(was): getattr(space, name) for space, name, was in self._undo if isinstance(space, ModuleType)}
        users = [module for module in list(sys.modules.values()) if _is_users(module)]
        for module in users:
            for name, value in list(vars(module).items()):
                if callable(value) and id(value) in put:
                    self.put(module, name, put[id(value)])

    def at_end(self, function: Callable[[], None]) -> None:
        """Let `undo` call a function."""
        self._at_end.append(function)

    @property
    def active(self) -> bool:
        """Return whether interceptions apply: a run is open, and this thread is not doing rank-local work."""
        return self._installed and not self._here.rank_local

    @property
    def rank_local(self) -> bool:
        """Return whether this thread is doing rank-local work."""
        return self._here.rank_local

    @contextmanager
    def rank_local_work(self) -> Iterator[None]:
        """Within the context, let this thread work without the other ranks: it does not communicate."""
        before, self._here.rank_local = self._here.rank_local, True
        try:
            yield
        finally:
            self._here.rank_local = before

    def undo(self) -> None:
        """Restore the originals."""
        self._installed = False
        while self._undo:
            space, name, original = self._undo.pop()
            setattr(space, name, original)
        while self._at_end:
            self._at_end.pop()()


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(module, ModuleType) and (
        module.__name__ == "__main__" or (isinstance(file, str) and is_users(file))
    )
