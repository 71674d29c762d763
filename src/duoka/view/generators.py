"""The generators from which a script draws: those of torch, Python and numpy, and their states.

All ranks hold the states that one device would have; `--randomness worker` draws from generators of the rank.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from ctypes import string_at
from typing import Any

import numpy as np
import torch
from torch import Tensor

from duoka.hardware import accelerator

_MT19937 = 2500  # bytes of the state of numpy's generator: 624 words and a position


class RankStream:
    """A context in which this rank draws from its own generators; the shared states are restored afterwards.

    Nested uses have no effect.
    """

    def __init__(self, seed: int) -> None:
        self._depth = 0
        self._states: dict[str, Tensor] = {}
        self._common: dict[str, Tensor] = {}
        self._seed = seed % 2**63

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for device, (get, put) in _generators().items():
            self._common[device] = get()
            if device not in self._states:
                self._states[device] = torch.Generator(device).manual_seed(self._seed).get_state()
            put(self._states[device])

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for device, (get, put) in _generators().items():
            self._states[device] = get()
            put(self._common[device])


def keep_states(others: Sequence[torch.Generator]) -> Callable[[], None]:
    """Return a function that puts the present states of the CPU's default generator and of others back."""
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *others)]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def _generators() -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    functions: dict[str, Any] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if module := accelerator.in_use():
        functions[accelerator.kind()] = (module.get_rng_state, module.set_rng_state)
    return functions


def seed_all(seed: int) -> None:
    """Seed torch's, Python's and numpy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> tuple[Any, ...]:
    """Return the states of torch's, Python's and numpy's generators."""
    return (
        {device: get() for device, (get, _) in _generators().items()},
        random.getstate(),
        np.random.get_state(),
    )


def set_random_states(states: tuple[Any, ...]) -> None:
    """Restore the states."""
    of_torch, of_python, of_numpy = states
    for device, (_, put) in _generators().items():
        put(of_torch[device])
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def random_marks() -> tuple[Any, ...]:
    """Return values that change with each draw from any of these generators; cheaper than their states."""
    numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy declares no such export
    return (
        *(get().numpy().tobytes() for get, _ in _generators().values()),
        random.getstate(),
        string_at(numpys.ctypes.state_address, _MT19937) if type(numpys) is np.random.MT19937 else str(numpys.state),
    )


def random_digest() -> int:
    """Return a checksum of the states of torch's generators, of 32 bits."""
    checksum = 0
    for get, _ in _generators().values():
        checksum = zlib.crc32(get().numpy().tobytes(), checksum)
    return checksum
