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

from duoka.plain.patching import Methods, Patches, stand_in
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
_SEEDS = (int, float, str, bytes, bytearray, list, tuple, np.ndarray, np.integer)


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

    def agreed(seed: Any) -> Any:
        """Return a seed that is equal on every rank; numpy's generators are returned as they are."""
        return shared_random.agree(seed) if isinstance(seed, _SEEDS) else seed

    def drawn(original: Callable[..., bytes], size: Any, *flags: int) -> bytes:
        shared = shared_random.draw(size) if isinstance(size, int) and size >= 0 else None
        return original(size, *flags) if shared is None else shared

    def seeded(original: Callable[..., Any], seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(agreed(seed), *args, **kwargs)

    for space, name in BYTES:
        if hasattr(space, name):
            patches.around(space, name)(drawn)
    for space, name in SEEDED:
        patches.around(space, name)(seeded)

    @patches.around(random, "seed")
    def seed_python(original: Callable[..., None], a: Any = None, version: int = 2) -> None:
        original(shared_random.draw(16) if a is None else agreed(a), version)

    @patches.around(random.Random, "seed")
    def seed_random(original: Callable[..., None], self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, shared_random.draw(16) if a is None else agreed(a), version)

    @patches.around(uuid, "uuid1")
    def uuid1(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return shared_random.agree(original(*args, **kwargs))

    methods = Methods(torch.Generator)
    seed_from_system = methods.seed

    def seed_torch(self: torch.Generator) -> int:
        seed = shared_random.draw(7)
        if seed is None:
            return seed_from_system(self)  # type: ignore[no-any-return]
        return self.manual_seed(int.from_bytes(seed, "little")).initial_seed()

    patches.put(methods, "seed", seed_torch)
    numpys = np.random.RandomState
    patches.put(np.random, "RandomState", stand_in(numpys, lambda seed=None: numpys(agreed(seed))))
    return patches.made()[before:]


def draw_alike(source: Callable[[str], SharedRandom], init: Callable[[int], None] | None, worker: int) -> None:
    """Begin a loader worker that is not forked: random numbers are equal on every rank. init: the script's own."""
    _intercept(source(str(worker)), Patches())
    if init is not None:
        init(worker)
