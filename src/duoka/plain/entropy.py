"""Sources of randomness that differ from process to process: agreed by all ranks, without a message."""

from __future__ import annotations

import hashlib
import random
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

    random.seed(fresh("random", 64))
    np.random.seed(fresh("numpy", 32))

    def torch_seed(original: Callable[..., Any]) -> Callable[..., int]:
        def seed() -> int:
            value = fresh("torch.seed", 56)
            torch.manual_seed(value)
            return value

        return seed

    def python_seed(original: Callable[..., Any]) -> Callable[..., None]:
        def seed(a: Any = None, version: int = 2) -> None:
            original(fresh("random.seed", 64) if a is None else a, version)

        return seed

    def numpy_seed(original: Callable[..., Any]) -> Callable[..., None]:
        def seed(seed: Any = None) -> None:
            original(fresh("numpy.random.seed", 32) if seed is None else seed)

        return seed

    def numpy_generator(original: Callable[..., Any]) -> Callable[..., Any]:
        def default_rng(seed: Any = None) -> Any:
            return original(fresh("default_rng", 64) if seed is None else seed)

        return default_rng

    patches = session.patches
    patches.replace(torch, "seed", torch_seed)
    patches.replace(torch.random, "seed", torch_seed)
    patches.replace(random, "seed", python_seed)
    patches.replace(np.random, "seed", numpy_seed)
    patches.replace(np.random, "default_rng", numpy_generator)
