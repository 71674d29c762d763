"""One random stream: every rank draws for the whole batch, as one device would, and keeps its own rows.

Works below autograd on torch's own operators, so that dropout hidden in attention or recurrent layers is seen
like any other. Nothing here knows a layer: an operator that draws carries the tag `nondeterministic_seeded`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from duoka.view.batch import Spec

# What these consume depends on the values drawn for, so they need every rank's.
_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise"})


@lru_cache(maxsize=None)
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


def draw_own_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec | None) -> Any:
    """What `func` draws for this rank's rows when it draws for all; spec: None draws the same on every rank."""
    if spec is None:
        return func(*args, **kwargs)
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        sizes = list(shape_drawn(args, kwargs))
        sizes[spec.dim] = spec.size
        whole = func(*(sizes if isinstance(value, (list, tuple)) else value for value in args), **kwargs)
        return spec.own(whole).contiguous()
    name = func.overloadpacket.__name__
    widen = spec.gather if name in _BY_VALUE else lambda rows: _among_others(rows, spec)

    def whole_of(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() > spec.dim and value.shape[spec.dim] == spec.local_size
        return widen(value) if fits else value

    if name.endswith("_"):
        whole = _laid_out_like(args[0], spec)
        func(whole, *map(whole_of, args[1:]), **{key: whole_of(value) for key, value in kwargs.items()})
        return args[0].copy_(spec.own(whole))
    out = func(*map(whole_of, args), **{key: whole_of(value) for key, value in kwargs.items()})
    return tree_map_only(Tensor, lambda whole: spec.own(whole).contiguous(), out)


def _laid_out_like(rows: Tensor, spec: Spec) -> Tensor:
    """An uninitialised whole tensor whose dimensions lie in memory in the order of `rows`' (draws fill in it)."""
    sizes = list(rows.shape)
    sizes[spec.dim] = spec.size
    order = sorted(range(rows.dim()), key=lambda dim: (-rows.stride(dim), dim))
    dense = torch.empty([sizes[dim] for dim in order], dtype=rows.dtype, device=rows.device)
    return dense.permute([order.index(dim) for dim in range(rows.dim())])


def _among_others(rows: Tensor, spec: Spec) -> Tensor:
    """A whole tensor with this rank's rows in place, and harmless values for the others'."""
    whole = _laid_out_like(rows, spec).fill_(0.5 if rows.is_floating_point() else 1)
    spec.own(whole).copy_(rows)
    return whole
