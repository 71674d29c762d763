"""Sources of randomness that differ from process to process: agreed by all ranks.

Seeds that the script leaves to the system come from a number that all ranks were given, without a message; seeds
that it gives (from the clock, say) and the system's own random bytes are rank 0's.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch

from duoka.plain.session import Session

# (where, names): the system's random bytes, of rank 0, also where the standard library asks for the script.
BYTES: tuple[tuple[Any, str], ...] = (
    (os, "urandom"),  # uuid4
    (random, "_urandom"),  # SystemRandom and secrets
    (uuid, "uuid1"),
)
# Rank 0's clock, where the script itself looks at it: it may decide by it. The standard library only waits by it.
CLOCK = (
    "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time ctime strftime localtime gmtime"
)
# Seeds and generators by name, with the bits of their seeds.
SEEDED: tuple[tuple[Any, str, int], ...] = (
    (random, "seed", 64),
    (np.random, "seed", 32),
    (np.random, "default_rng", 32),
    (torch, "manual_seed", 56),
    (torch.random, "manual_seed", 56),
)


def install(session: Session) -> None:
    """Start all generators alike; seeds that the script leaves to the system are the same on every rank."""
    counts: dict[str, Any] = {}
    patches, caller = session.patches, session.caller

    def fresh(source: str, bits: int) -> int:
        """The next number that `source` would have from the system."""
        number = next(counts.setdefault(source, count()))
        digest = hashlib.sha256(f"{session.entropy}/{source}/{number}".encode()).digest()
        return int.from_bytes(digest[: bits // 8], "little")

    def agreed(seed: Any, source: str, bits: int) -> Any:
        """The seed of rank 0 (a script may take it from the clock), or a fresh one where none is given."""
        if not caller.is_script():
            return seed
        if seed is None:
            return fresh(source, bits)
        return session.ranks.broadcast_object(seed, 0) if isinstance(seed, _PLAIN) else seed

    def make_seeded(bits: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def seeded(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
                return original(agreed(seed, original.__qualname__, bits), *args, **kwargs)

            return seeded

        return make

    def make_torch_fresh(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed() -> int:
            value = agreed(None, "torch.seed", 56)
            if value is None:
                return original()  # type: ignore[no-any-return]
            torch_manual_seed(value)
            return value  # type: ignore[no-any-return]

        return seed

    def make_method(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
            original(self, agreed(a, "random.Random", 64), version)

        return seed

    def make_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_rank_0(*args: Any, **kwargs: Any) -> Any:
            if not caller.is_script():
                return original(*args, **kwargs)
            return session.first(lambda: original(*args, **kwargs))

        return of_rank_0

    def make_clock(original: Callable[..., Any]) -> Callable[..., Any]:
        def clock(*args: Any) -> Any:
            if not caller.is_script_itself():
                return original(*args)
            now = original(*args)
            if isinstance(now, (float, int)):  # one message instead of two
                dtype = torch.float64 if isinstance(now, float) else torch.int64
                return session.ranks.broadcast(torch.tensor([now], dtype=dtype), 0).item()
            return session.first(lambda: now)

        return clock

    torch_manual_seed = torch.manual_seed
    random.seed(fresh("random", 64))
    np.random.seed(fresh("numpy", 32))
    torch_manual_seed(session.ranks.broadcast_object(torch.initial_seed(), 0))
    for space, name, bits in SEEDED:
        patches.replace(space, name, make_seeded(bits))
    for space in (torch, torch.random):
        patches.replace(space, "seed", make_torch_fresh)
    patches.replace(random.Random, "seed", make_method)
    patches.put(np.random, "RandomState", _random_state(lambda seed: agreed(seed, "RandomState", 32)))
    patches.put(torch, "Generator", _generator(lambda seed: agreed(seed, "Generator", 56)))
    for space, names in BYTES:
        for name in names.split():
            patches.replace(space, name, make_bytes)
    for name in CLOCK.split():
        patches.replace(time, name, make_clock)


def _random_state(agree: Callable[[Any], Any]) -> type:
    """`np.random.RandomState`, whose instances are still numpy's own."""
    original = np.random.RandomState

    class Made(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __call__(cls, seed: Any = None) -> Any:
            return original(agree(seed)) if cls is RandomState else super().__call__(seed)

    class RandomState(np.random.RandomState, metaclass=Made):
        pass

    return RandomState


def _generator(agree: Callable[[Any], Any]) -> type:
    """`torch.Generator` whose `seed()` is the same on every rank."""
    original = torch.Generator

    class Made(type(torch.Generator)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    class Generator(torch.Generator, metaclass=Made):
        def seed(self) -> int:
            value = agree(None)
            if value is None:
                return super().seed()
            self.manual_seed(value)
            return int(value)

    return Generator


_PLAIN = (int, float, str, bytes, bytearray, list, tuple, np.ndarray, np.integer)  # a generator stays itself
