"""One random stream: every rank draws for the whole batch, as one device would, and keeps its own rows.

Works below autograd on torch's own operators, so that dropout hidden in attention or recurrent layers is seen
like any other. Nothing here knows a layer: an operator that draws carries the tag `nondeterministic_seeded`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from duoka.view.batch import Spec

# What these consume depends on the values drawn for, so they need every rank's.
_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise"})


@cache
def is_seeded(operator: Any) -> bool:
    """Whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


class SeededMode(TorchDispatchMode):
    """Hands every operator that draws to `draw(operator, args, kwargs)`."""

    def __init__(self, draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._draw = draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._draw(func, args, kwargs) if is_seeded(func) else func(*args, **kwargs)


def shape_drawn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape that an operator draws for: its first tensor's, or the one that it is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return tuple(value.shape)
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            return tuple(value)
    return (args[0],)  # randperm


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest in memory: draws fill it in this order."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def draw_own_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, order: tuple[int, ...] | None = None
) -> Any:
    """What `func` draws for this rank's rows when it draws for all.

    order: the memory order known from larger shares; a share of one row does not show it.
    """
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        sizes = list(shape_drawn(args, kwargs))
        sizes[spec.dim] = spec.size
        whole = func(*(sizes if isinstance(value, (list, tuple)) else value for value in args), **kwargs)
        return spec.own(whole).contiguous()
    name = func.overloadpacket.__name__
    order = order if spec.local_size == 1 else None
    widen = spec.gather if name in _BY_VALUE else lambda rows: _among_others(rows, spec, order)

    def whole_of(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() > spec.dim and value.shape[spec.dim] == spec.local_size
        return widen(value) if fits else value

    if name.endswith("_"):
        whole = _laid_out_like(args[0], spec, order)
        func(whole, *map(whole_of, args[1:]), **{key: whole_of(value) for key, value in kwargs.items()})
        return args[0].copy_(spec.own(whole))
    out = func(*map(whole_of, args), **{key: whole_of(value) for key, value in kwargs.items()})
    return tree_map_only(Tensor, lambda whole: spec.own(whole).contiguous(), out)


def _laid_out_like(rows: Tensor, spec: Spec, order: tuple[int, ...] | None) -> Tensor:
    """An uninitialised whole tensor whose dimensions lie in memory as those of `rows` do."""
    sizes = list(rows.shape)
    sizes[spec.dim] = spec.size
    order = memory_order(rows) if order is None or len(order) != rows.dim() else order
    dense = torch.empty([sizes[dim] for dim in order], dtype=rows.dtype, device=rows.device)
    return dense.permute([order.index(dim) for dim in range(rows.dim())])


def _among_others(rows: Tensor, spec: Spec, order: tuple[int, ...] | None) -> Tensor:
    """A whole tensor with this rank's rows in place, and harmless values for the others'."""
    whole = _laid_out_like(rows, spec, order).fill_(0.5 if rows.is_floating_point() else 1)
    spec.own(whole).copy_(rows)
    return whole


class OwnStream:
    """A context in which this rank draws from a stream of its own; the common one is put back as it was."""

    def __init__(self, seed: int) -> None:
        self._states: dict[str, Tensor] = {}
        self._common: dict[str, Tensor] = {}
        self._seed = seed % 2**63

    def __enter__(self) -> None:
        for device, (get, put) in _generators().items():
            self._common[device] = get()
            if device not in self._states:
                self._states[device] = torch.Generator(device).manual_seed(self._seed).get_state()
            put(self._states[device])

    def __exit__(self, *error: object) -> None:
        for device, (get, put) in _generators().items():
            self._states[device] = get()
            put(self._common[device])


def _generators() -> dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    found: dict[str, Any] = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if torch.cuda.is_initialized():
        found["cuda"] = (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    return found


def random_states() -> tuple[Any, ...]:
    """The states of all generators that a script draws from: torch's, Python's, numpy's."""
    return (
        {device: get() for device, (get, _) in _generators().items()},
        random.getstate(),
        np.random.get_state(),
    )


def set_random_states(states: tuple[Any, ...]) -> None:
    """Put them back."""
    of_torch, of_python, of_numpy = states
    for device, (_, put) in _generators().items():
        put(of_torch[device])
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def same_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn in between."""
    same_torch = all(torch.equal(state, other[0][device]) for device, state in one[0].items())
    return same_torch and one[1] == other[1] and one[2][2] == other[2][2] and bool((one[2][1] == other[2][1]).all())


def random_fingerprint() -> int:
    """16 bits of torch's random states: equal on ranks that have drawn the same."""
    found = 0
    for get, _ in _generators().values():
        found = zlib.crc32(get().numpy().tobytes(), found)
    return found & 0xFFFF
