"""Sources of randomness that differ from process to process: agreed by all ranks, without a message."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch

from duoka.plain.session import Session


def install(session: Session) -> None:
    """Start all generators alike; seeds that the script leaves to the system are the same on every rank."""
    counts: dict[str, Any] = {}

    def fresh(source: str, bits: int) -> int:
        """The next number that `source` would have from the system."""
        number = next(counts.setdefault(source, count()))
        digest = hashlib.sha256(f"{session.entropy}/{source}/{number}".encode()).digest()
        return int.from_bytes(digest[: bits // 8], "little")

    def agreed(seed: Any, source: str, bits: int) -> Any:
        """The seed of rank 0 (a script may take it from the clock), or a fresh one where none is given."""
        if seed is None:
            return fresh(source, bits)
        return session.ranks.broadcast_object(seed, 0) if patches.active else seed

    def make_torch(original: Callable[..., Any]) -> Callable[..., Any]:
        def manual_seed(seed: int) -> torch.Generator:
            return original(agreed(seed, "torch", 56))  # type: ignore[no-any-return]

        return manual_seed

    def make_torch_fresh(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed() -> int:
            value = fresh("torch", 56)
            torch_manual_seed(value)
            return value

        return seed

    def make_python(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(a: Any = None, version: int = 2) -> None:
            original(agreed(a, "random", 64), version)

        return seed

    def make_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(seed: Any = None) -> Any:
            return original(agreed(seed, original.__name__, 32))

        return seed

    def make_uuid(original: Callable[..., Any]) -> Callable[..., Any]:
        def uuid4() -> uuid.UUID:
            return uuid.UUID(int=fresh("uuid4", 128), version=4)

        return uuid4

    patches, torch_manual_seed = session.patches, torch.manual_seed
    random.seed(fresh("random", 64))
    np.random.seed(fresh("numpy", 32))
    for space in (torch, torch.random):
        patches.replace(space, "manual_seed", make_torch)
        patches.replace(space, "seed", make_torch_fresh)
    patches.replace(random, "seed", make_python)
    patches.replace(np.random, "seed", make_numpy)
    patches.replace(np.random, "default_rng", make_numpy)
    patches.replace(uuid, "uuid4", make_uuid)
