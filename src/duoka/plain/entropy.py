"""Sources of random numbers in Python: equal on all ranks, also in libraries.

`secrets`, `uuid4`, `SystemRandom` and numpy's seeds use `os.urandom`; `random` and torch read the system's random
numbers in C. Given seeds may be computed from the clock or the process id: they are settled. Random numbers that
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

from duoka.plain.builtin import Methods
from duoka.plain.chance import Chance
from duoka.plain.patching import Patches
from duoka.plain.session import Session
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
    """Seed all generators alike, and intercept their seeding; in processes forked from here, too."""
    chance, patches = session.chance, session.patches
    torch.manual_seed(session.ranks.broadcast_object(torch.initial_seed(), 0))
    np.random.seed(list(chance.shared(16)))
    random.seed(chance.shared(16))
    own = _intercept(chance, patches)

    def begin() -> None:
        for space, name, value in own:
            setattr(space, name, value)
        if not chance.by_itself():
            random.seed(chance.shared(16))  # Python has just seeded it from the system

    os.register_at_fork(after_in_child=begin)


def _intercept(chance: Chance, patches: Patches) -> list[tuple[Any, str, Any]]:
    """Install the replacements; return those made here."""
    before = len(patches.made())
    for space, name in BYTES:
        if hasattr(space, name):
            patches.replace(space, name, lambda original: _bytes(original, chance))
    for space, name in SEEDED:
        patches.replace(space, name, lambda original: _seeded(original, chance))
    patches.replace(random, "seed", lambda original: _python_seed(original, chance))
    patches.replace(random.Random, "seed", lambda original: _random_seed(original, chance))
    patches.replace(uuid, "uuid1", lambda original: lambda *args, **how: chance.settle(original(*args, **how)))
    patches.put(np.random, "RandomState", _random_state(chance))
    methods = Methods(torch.Generator)
    patches.put(methods, "seed", _torch_seed(methods.seed, chance))
    return patches.made()[before:]


class DrawingAlike:
    """A loader's `worker_init_fn`, for workers that are not forked: theirs are the same on every rank, too.

    init: the script's own, called afterwards.
    """

    def __init__(self, source: Callable[[str], Chance], init: Callable[[int], None] | None) -> None:
        self._source, self._init = source, init

    def __call__(self, worker: int) -> None:
        _intercept(self._source(str(worker)), Patches())
        if self._init is not None:
            self._init(worker)


def _bytes(original: Callable[..., bytes], chance: Chance) -> Callable[..., bytes]:
    def random_bytes(size: Any, *flags: int) -> bytes:
        drawn = chance.draw(size) if isinstance(size, int) and size >= 0 else None
        return original(size, *flags) if drawn is None else drawn

    return random_bytes


def _settled(seed: Any, chance: Chance) -> Any:
    """Return a seed that is equal on every rank; numpy's generators are returned as they are."""
    plain = (int, float, str, bytes, bytearray, list, tuple, np.ndarray, np.integer)
    return chance.settle(seed) if isinstance(seed, plain) else seed


def _seeded(original: Callable[..., Any], chance: Chance) -> Callable[..., Any]:
    return lambda seed=None, *args, **kwargs: original(_settled(seed, chance), *args, **kwargs)


def _python_seed(original: Callable[..., None], chance: Chance) -> Callable[..., None]:
    def seed(a: Any = None, version: int = 2) -> None:
        original(chance.draw(16) if a is None else _settled(a, chance), version)

    return seed


def _random_seed(original: Callable[..., None], chance: Chance) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, chance.draw(16) if a is None else _settled(a, chance), version)

    return seed


def _torch_seed(original: Callable[[torch.Generator], int], chance: Chance) -> Callable[[torch.Generator], int]:
    def seed(self: torch.Generator) -> int:
        drawn = chance.draw(7)
        if drawn is None:
            return original(self)
        number = int.from_bytes(drawn, "little")
        self.manual_seed(number)
        return number

    return seed


def _random_state(chance: Chance) -> type:
    """Return a replacement of `np.random.RandomState`, whose instances are numpy's own."""
    original = np.random.RandomState

    class Made(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __call__(cls, seed: Any = None) -> Any:
            return original(_settled(seed, chance)) if cls is RandomState else super().__call__(seed)

    class RandomState(np.random.RandomState, metaclass=Made):
        pass

    return RandomState
