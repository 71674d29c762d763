"""Sources of random numbers in Python: equal on all ranks, also in libraries.

`secrets`, `uuid4`, `SystemRandom` and numpy's seeds use `os.urandom`; `random` and torch read the system's random
numbers in C. Given seeds may be computed from the clock or the process id: they are agreed on. Random numbers that
other C code reads (OpenSSL, libraries in Rust and C++) differ between processes.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from duoka.plain.patching import Methods, Patches
from duoka.plain.session import Session
from duoka.plain.shared_random import SharedRandom
from duoka.private.python import SYSTEMS_BYTES

BYTES: tuple[tuple[Any, str], ...] = ((os, "urandom"), (os, "getrandom"), SYSTEMS_BYTES)
# Functions that take a seed; without one numpy's draw bytes, and torch's require one.
SEEDED: tuple[tuple[Any, str], ...] = (
    (np.random, "seed"),
    (np.random, "default_rng"),
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
)


def install(session: Session) -> None:
    """Seed all generators equally on all ranks, and intercept their seeding, in forked processes, too."""
    shared_random, patches = session.shared_random, session.patches
    torch.manual_seed(session.ranks.broadcast_object(torch.initial_seed(), 0))
    np.random.seed(list(shared_random.shared(16)))
    random.seed(shared_random.shared(16))
    replaced = _intercept(shared_random, patches)

    def begin() -> None:
        for space, name, value in replaced:
            setattr(space, name, value)
        if not shared_random.rank_local():
            random.seed(shared_random.shared(16))  # Python has just seeded it from the system

    os.register_at_fork(after_in_child=begin)


def _intercept(shared_random: SharedRandom, patches: Patches) -> list[tuple[Any, str, Any]]:
    """Install the replacements; return those made here."""
    before = len(patches.made())
    for space, name in BYTES:
        if hasattr(space, name):
            patches.replace(space, name, lambda original: _bytes(original, shared_random))
    for space, name in SEEDED:
        patches.replace(space, name, lambda original: _seeded(original, shared_random))
    patches.replace(random, "seed", lambda original: _python_seed(original, shared_random))
    patches.replace(random.Random, "seed", lambda original: _random_seed(original, shared_random))
    patches.replace(uuid, "uuid1", lambda original: lambda *args, **how: shared_random.agree(original(*args, **how)))
    patches.put(np.random, "RandomState", _random_state(shared_random))
    methods = Methods(torch.Generator)
    patches.put(methods, "seed", _torch_seed(methods.seed, shared_random))
    return patches.made()[before:]


class DrawingAlike:
    """A loader's `worker_init_fn` that makes random numbers equal on every rank, for workers that are not forked.

    init: the script's own, called afterwards.
    """

    def __init__(self, source: Callable[[str], SharedRandom], init: Callable[[int], None] | None) -> None:
        self._source, self._init = source, init

    def __call__(self, worker: int) -> None:
        _intercept(self._source(str(worker)), Patches())
        if self._init is not None:
            self._init(worker)


def _bytes(original: Callable[..., bytes], shared_random: SharedRandom) -> Callable[..., bytes]:
    def random_bytes(size: Any, *flags: int) -> bytes:
        drawn = shared_random.draw(size) if isinstance(size, int) and size >= 0 else None
        return original(size, *flags) if drawn is None else drawn

    return random_bytes


def _agreed(seed: Any, shared_random: SharedRandom) -> Any:
    """Return a seed that is equal on every rank; numpy's generators are returned as they are."""
    plain = (int, float, str, bytes, bytearray, list, tuple, np.ndarray, np.integer)
    return shared_random.agree(seed) if isinstance(seed, plain) else seed


def _seeded(original: Callable[..., Any], shared_random: SharedRandom) -> Callable[..., Any]:
    return lambda seed=None, *args, **kwargs: original(_agreed(seed, shared_random), *args, **kwargs)


def _python_seed(original: Callable[..., None], shared_random: SharedRandom) -> Callable[..., None]:
    def seed(a: Any = None, version: int = 2) -> None:
        original(shared_random.draw(16) if a is None else _agreed(a, shared_random), version)

    return seed


def _random_seed(original: Callable[..., None], shared_random: SharedRandom) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, shared_random.draw(16) if a is None else _agreed(a, shared_random), version)

    return seed


def _torch_seed(
    original: Callable[[torch.Generator], int], shared_random: SharedRandom
) -> Callable[[torch.Generator], int]:
    def seed(self: torch.Generator) -> int:
        drawn = shared_random.draw(7)
        if drawn is None:
            return original(self)
        number = int.from_bytes(drawn, "little")
        self.manual_seed(number)
        return number

    return seed


def _random_state(shared_random: SharedRandom) -> type:
    """Return a replacement of `np.random.RandomState`, whose instances are numpy's own."""
    original = np.random.RandomState

    class Made(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __call__(cls, seed: Any = None) -> Any:
            return original(_agreed(seed, shared_random)) if cls is RandomState else super().__call__(seed)

    class RandomState(np.random.RandomState, metaclass=Made):
        pass

    return RandomState
