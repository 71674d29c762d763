"""Random bytes and values that are equal on every rank, without communication for each.

Random bytes are a keyed hash of the run's entropy, of the place that draws (the lines of all functions on the stack)
and of how often it has drawn. So a rank that draws more often at one place does not shift what the others draw
elsewhere. A value computed from something else (a seed from the clock) is agreed on: all ranks use the value of the
rank that needs it first.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.network.keys import Key, sign_object, verify_object

# Draw names of files, semaphores and sockets, and keys of connections, which must differ between processes.
OWN = ("multiprocessing", "tempfile", "torch.distributed", "torch.multiprocessing", "torch._inductor", "triton")
_ASKING = ("random", "secrets", "uuid", "numpy", "duoka")  # draw for their callers
_DUOKA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class SharedRandom:
    """The random source of a process. A forked process has its own source, which depends on the place of the fork.

    entropy: a number equal on all ranks. key: of the run.
    reach: connects to the ranks' store (holder=: the worker that has it open, for a process that has not inherited
    it); None with one rank. rank_local: returns whether the current code runs on this rank only.
    """

    def __init__(self, entropy: int, reach: Callable[..., Store] | None = None, key: Key | None = None) -> None:
        self._run_key = key or Key()
        self.entropy, self._scope = entropy, f"{entropy:x}"
        self._reach = reach
        self._stores: dict[int, Store] = {}  # by process
        self._counts: dict[str, Iterator[int]] = {}
        self._forking: dict[int, str | None] = {}  # by thread
        self.rank_local: Callable[[], bool] = lambda: False
        os.register_at_fork(before=self._fork, after_in_parent=self._forked, after_in_child=self._begin)

    def draw(self, count: int) -> bytes | None:
        """Return `count` random bytes, equal on every rank; None if they must be this process's own."""
        if self.rank_local() or _is_of(_asking(sys._getframe(1)), OWN):
            return None
        return self.shared(count)

    def shared(self, count: int) -> bytes:
        """Return `count` random bytes, equal on every rank."""
        return hashlib.shake_256(self._key("draw").encode()).digest(count)

    def agree(self, value: Any) -> Any:
        """Return the `value` of the rank that calls this first. It must be picklable."""
        if self._reach is None or self.rank_local() or _is_of(_asking(sys._getframe(1)), ("torch",)):
            return value
        key = self._key("agree")
        agreed: bytes = self._connected().compare_set(
            f"shared_random/{key}", "", sign_object(value, self._run_key).hex()
        )
        return verify_object(bytes.fromhex(agreed.decode()), self._run_key)

    def started_anew(self) -> Callable[[str], SharedRandom] | None:
        """Return a picklable function that creates the source of a process that does not inherit this memory.

        It takes a name that differs between such processes. None: that process draws its own random numbers.
        """
        if self.rank_local():
            return None
        reach = self._reach and partial(self._reach, holder=os.getpid())
        return partial(_of_new_process, self.entropy, reach, self._run_key, self._key("process"))

    def _key(self, what: str) -> str:
        """Return a key that identifies this random draw within the run, and is equal on every rank.

        what: the purpose: "draw", "agree", "process" or "fork". The key also contains the thread's name, the lines of
        the script on the stack, and the number of earlier draws there.
        """
        text = f"{self._scope}/{what}/{threading.current_thread().name}/{place_of(sys._getframe(2))}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{digest}/{next(self._counts.setdefault(digest, itertools.count()))}"

    def _connected(self) -> Store:
        """Return a connection of this process's own: a forked one must not use its parent's."""
        assert self._reach is not None
        process = os.getpid()
        if process not in self._stores:
            self._stores = {process: self._reach()}
        return self._stores[process]

    def _fork(self) -> None:
        self._forking[threading.get_ident()] = None if self.rank_local() else self._key("fork")

    def _forked(self) -> None:
        del self._forking[threading.get_ident()]

    def _begin(self) -> None:
        scope = self._forking.pop(threading.get_ident())
        self._forking, self._counts = {}, {}
        if scope is None:
            self.rank_local = lambda: True
        else:
            self._scope = scope


def _of_new_process(
    entropy: int, reach: Callable[..., Store] | None, key: Key, scope: str, name: str
) -> SharedRandom:
    shared_random = SharedRandom(entropy, reach, key)
    shared_random._scope = f"{scope}/{name}"
    return shared_random


def _asking(frame: FrameType | None) -> str:
    """Return the name of the module that draws."""
    while frame is not None and _is_of(name := frame.f_globals.get("__name__", ""), _ASKING):
        frame = frame.f_back
    return "" if frame is None else name


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def place_of(frame: FrameType | None) -> str:
    """Return the lines on the stack, innermost first, without file names, which differ for generated code.

    Frames of torch and duoka are left out: they may differ between ranks.
    """
    lines = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_DUOKA, _TORCH)):
            lines.append(f"{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return "/".join(lines)
