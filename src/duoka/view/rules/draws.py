"""Random draws for rows: every rank draws for the whole batch, as one device would, and keeps its rows.

Works on torch's operators, below autograd, so that dropout within attention or recurrent layers is included.
Operators that draw carry the tag `nondeterministic_seeded`.

Why: docs/decisions/0011-draws-below-autograd.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from duoka.private.torch import TorchDispatchMode, parts_of, schema_of, tree_map_only
from duoka.view.generators import random_digest
from duoka.view.shares.strides import Strides, global_strides, memory_order
from duoka.view.tensor.spec import Spec

# These ignore the previous values of the tensor that they fill.
FILLING = frozenset({"normal_", "uniform_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_"})
# These draw more or fewer numbers depending on their input, so they need all rows.
_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise"})


# Operators seen, by their ids, as to hash one calls Python: the operator, and what `_is_seeded` returns.
_SEEDED: dict[int, tuple[Any, bool, int | None]] = {}


def _is_seeded(operator: Any) -> tuple[bool, int | None]:
    """Return whether an operator may draw from a generator, and the index of its argument `dropout_p`, or None."""
    names = [argument.name for argument in schema_of(operator).arguments]
    index = names.index("dropout_p") if "dropout_p" in names else None
    return torch.Tag.nondeterministic_seeded in operator.tags, index


def is_drawing(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator draws from a generator; attention without dropout does not."""
    known = _SEEDED.get(id(operator))
    if known is None:
        known = _SEEDED[id(operator)] = (operator, *_is_seeded(operator))
    _, seeded, index = known
    if not seeded or index is None:
        return seeded
    return bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


def is_by_value(operator: Any) -> bool:
    """Return True if the number of draws depends on the values of the input."""
    return operator.overloadpacket.__name__.rstrip("_") in _BY_VALUE


class SeededMode(TorchDispatchMode):
    """Calls `draw(operator, args, kwargs)` instead of every operator that draws."""

    def __init__(self, draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._draw = draw
        self._in_parts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and (parts := parts_of(func)) is not None:
            outer, self._in_parts = self._in_parts, True
            try:
                with self:  # in other modes autograd has divided it
                    return parts(*args, **kwargs)
            finally:
                self._in_parts = outer
        out = self._draw(func, args, kwargs) if is_drawing(func, args, kwargs) else func(*args, **kwargs)
        if self._in_parts:  # torch counts the writes of a whole operator only
            increment_version([tensor for tensor in _written(func, args) if not tensor.is_inference()])
        return out


def _written(operator: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors among the arguments that an operator writes to."""
    declared = zip(schema_of(operator).arguments, args, strict=False)
    return [
        value
        for argument, value in declared
        if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write
    ]


class Layout(NamedTuple):
    """The layout of a whole batch in memory."""

    shape: Sequence[int]
    strides: Strides


def shape_drawn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape that an operator draws: that of its first tensor, or the one among its arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return tuple(value.shape)
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            return tuple(value)
    return (args[0],)  # randperm


def draw_own_rows(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, layout: Layout | None = None
) -> Any:
    """Return what `func` draws for this rank's rows when it draws for the whole batch.

    layout: of the whole batch, which the strides of a single row do not determine.
    """
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        sizes = list(shape_drawn(args, kwargs))
        sizes[spec.dim] = spec.size
        full = func(*(sizes if isinstance(value, (list, tuple)) else value for value in args), **kwargs)
        return spec.local_rows(full).clone()
    layout = layout if spec.local_size == 1 else None
    if func is torch.ops.aten.bernoulli_.float and _draw_in_place(func, args, kwargs, spec, layout):
        return args[0]
    by_value = is_by_value(func)
    wholes: dict[int, Tensor] = {}

    def whole_of(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= spec.dim or value.shape[spec.dim] != spec.local_size:
            return value
        if id(value) not in wholes:
            if by_value:
                wholes[id(value)] = spec.gather(value).to(draws_on(value, spec))
            elif func.overloadpacket.__name__ in FILLING and value is args[0]:
                wholes[id(value)] = _laid_out_like(value, spec, layout)
            else:
                wholes[id(value)] = _among_others(value, spec, layout)
        return wholes[id(value)]

    out = func(*map(whole_of, args), **{key: whole_of(value) for key, value in kwargs.items()})
    rows = {id(wholes[id(value)]): value for value in (*args, *kwargs.values()) if id(value) in wholes}
    for value in _written(func, args):
        if id(value) in wholes:
            value.copy_(spec.local_rows(wholes[id(value)]))

    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    def local_rows(full: Tensor) -> Any:
        if id(full) in rows:
            return rows[id(full)]
        drawn = spec.local_rows(full)
        # Dimensions of size 1 have strides from which those of the batch follow, too.
        strides = spec.local_strides(full.stride())
        return torch.empty_strided(drawn.shape, strides, dtype=full.dtype, device=device).copy_(drawn)

    return tree_map_only(Tensor, local_rows, out)


class DrawCache:
    """Draws for the whole batch by the first of several local shares, kept for the others."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}  # what is drawn -> all rows, and the state after

    def draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, layout: Layout | None
    ) -> Any:
        """As `draw_own_rows`; cached for operators that fill a CPU tensor from the default generator."""
        name, rows = func.overloadpacket.__name__, args[0] if args else None
        fills = name in FILLING or func is torch.ops.aten.bernoulli_.float
        if not fills or not isinstance(rows, Tensor) or rows.device.type != "cpu" or kwargs.get("generator"):
            return draw_own_rows(func, args, kwargs, spec, layout)
        key = random_digest(), func, args[1:], tuple(kwargs.items())
        if key in self._kept:
            full, after = self._kept[key]
            torch.set_rng_state(after)
        else:
            full = _laid_out_like(rows, spec, layout if spec.local_size == 1 else None)
            func(full, *args[1:], **kwargs)
            self._kept[key] = full, torch.get_rng_state()
        rows.copy_(spec.local_rows(full))
        return rows


_CHUNK = 1 << 15  # numbers drawn at a time, which fit into the processor's cache
_MANTISSA = 53  # bits of each 64 that `bernoulli_` uses


def _draw_in_place(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, layout: Layout | None
) -> bool:
    """Fill the local rows as `bernoulli_` on the whole batch would, without memory for the other rows.

    Returns False, without drawing, if this would not give the same numbers, or the rows are not contiguous.
    """
    rows, likely = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    order = memory_order(rows.stride() if layout is None else layout.strides)
    laid = rows.permute(order)
    if draws_on(rows, spec).type != "cpu" or len(order) != rows.dim() or not laid.is_contiguous() or not _is_known():
        return False
    if not rows.numel() or rows.is_complex() or not 0 <= likely <= 1:
        return False
    start = first_of_adjacent(spec)
    if start is None:
        return False
    run = laid.shape[order.index(spec.dim) + 1 :].numel()
    lines = laid.view(-1, spec.local_size * run)
    draw_lines(lines, start * run, spec.size * run, likely, kwargs.get("generator"))
    return True


@lru_cache(maxsize=64)
def first_of_adjacent(spec: Spec) -> int | None:
    """Return the place of this rank's first row; None if its rows are not adjacent."""
    places = spec.local_rows(torch.arange(spec.size).view([1] * spec.dim + [-1])).flatten()
    start, stop = int(places[0]), int(places[-1]) + 1
    return start if stop - start == spec.local_size else None


def draw_lines(lines: Tensor, start: int, size: int, likely: float, generator: torch.Generator | None) -> None:
    """Fill `lines`, shape (n, local), as entries `start` and following of lines of `size` by `bernoulli_(likely)`."""
    stop = start + lines.shape[1]
    bits = torch.empty(min(_CHUNK, len(lines) * size), dtype=torch.int64)

    def draw(count: int) -> Tensor:
        return bits[:count].random_(generator=generator)

    def skip(count: int) -> None:
        for first in range(0, count, _CHUNK):
            draw(min(_CHUNK, count - first))

    if size <= _CHUNK:
        for some in lines.split(_CHUNK // size):
            _decide(draw(len(some) * size).view(len(some), size)[:, start:stop], likely, some)
        return
    for line in lines:
        skip(start)
        for part in line.split(_CHUNK):
            _decide(draw(len(part)), likely, part)
        skip(size - stop)


def _decide(bits: Tensor, likely: float, out: Tensor) -> None:
    """Convert 64 random bits per entry to draws, as `bernoulli_(likely)` does."""
    torch.lt(bits.bitwise_and_((1 << _MANTISSA) - 1), math.ceil(likely * (1 << _MANTISSA)), out=out)


@cache
def _is_known() -> bool:
    """Return True if this torch's `bernoulli_` on a CPU draws as `draw_lines` does."""
    torchs, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    full, lines = torch.empty(2, 999).bernoulli_(0.3, generator=torchs), torch.empty(2, 500)
    draw_lines(lines, 400, 999, 0.3, other)
    return torch.equal(full[:, 400:900], lines) and torch.equal(torchs.get_state(), other.get_state())


def draws_on(rows: Tensor, spec: Spec) -> torch.device:
    """Return the device whose generator draws for rows: for offloaded ones that which computes with them."""
    return spec.view.computes_on or rows.device


def _laid_out_like(rows: Tensor, spec: Spec, layout: Layout | None) -> Tensor:
    """Return an uninitialised tensor for the whole batch with the memory layout of `rows`, including gaps."""
    sizes = list(rows.shape)
    sizes[spec.dim] = spec.size
    if layout is not None and list(layout.shape) == sizes and (0 in layout.strides) == (0 in rows.stride()):
        return torch.empty_strided(sizes, layout.strides, dtype=rows.dtype, device=draws_on(rows, spec))
    if layout is not None and len(layout.shape) == rows.dim():
        order = memory_order(layout.strides)
        once = [1 if rows.stride(dim) == 0 else sizes[dim] for dim in order]  # expanded: one entry in memory
        dense = torch.empty(once, dtype=rows.dtype, device=draws_on(rows, spec))
        return dense.permute([order.index(dim) for dim in range(rows.dim())]).expand(sizes)
    strides = global_strides(rows.stride(), spec.dim, 1, spec.size, spec.local_size)
    return torch.empty_strided(sizes, strides, dtype=rows.dtype, device=draws_on(rows, spec))


def _among_others(rows: Tensor, spec: Spec, layout: Layout | None) -> Tensor:
    """Return a tensor for the whole batch with this rank's rows, and valid values in the others."""
    full = _laid_out_like(rows, spec, layout)
    memory = full
    for dim, stride in enumerate(full.stride()):
        if stride == 0:  # expanded: one entry in memory
            memory, rows = memory.narrow(dim, 0, 1), rows.narrow(dim, 0, 1)
    memory.fill_(0.5 if rows.is_floating_point() else 1)
    if full.stride(spec.dim) == 0:
        memory.copy_(rows)
        return full
    local = spec.local_rows(memory)
    if local.untyped_storage().data_ptr() == full.untyped_storage().data_ptr():
        local.copy_(rows)
    else:  # a copy, of rows that are in several places
        places = spec.local_rows(torch.arange(spec.size).view([1] * spec.dim + [-1])).flatten()
        memory.index_copy_(spec.dim, places.to(memory.device), rows.to(memory.device))
    return full
