"""Rules for random functions: draw for the whole batch, and keep the local rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.draws import Layout, SeededMode, draw_own_rows, draws_on, first_of_adjacent, shape_drawn
from duoka.view.rules.kernel_draws import drawn_inside, drops_inside
from duoka.view.rules.lookup import align, argument, functions, in_place, localise, wrap
from duoka.view.shares.local import Outdated
from duoka.view.shares.strides import contiguous_strides, is_dense
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec

FRESH = """
dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu gumbel_softmax
rand_like randn_like randint_like bernoulli normal poisson multinomial binomial
"""
FILLING = "bernoulli_ normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ dropout_ alpha_dropout_"


def placing(spec_of: Callable[[tuple[int, ...]], Spec | None], layout: Layout | None = None) -> SeededMode:
    """Return a context in which operators that draw for rows draw for the whole batch and keep the local rows.

    spec_of: where the rows are in what is drawn, by its shape; None where it is no rows. layout: `_layout_in`.
    """

    def draw(operator: Any, args: Args, kwargs: Kwargs) -> Any:
        spec = spec_of(shape_drawn(args, kwargs))
        if spec is None:
            return operator(*args, **kwargs)
        view, draw_cache = spec.view, spec.view.shares.draw_cache
        view.drawn += 1
        if view.rank_stream is not None:
            with view.rank_stream:
                return operator(*args, **kwargs)
        if drops_inside(operator):
            return drawn_inside(operator, args, kwargs, spec)
        return (draw_own_rows if draw_cache is None else draw_cache.draw)(operator, args, kwargs, spec, layout)

    return SeededMode(draw)


def _layout_in(values: tuple[Any, ...], func: Function) -> Layout | None:
    """Return the layout of what is drawn for the whole batch, which one row does not determine; None: unknown."""
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if not isinstance(first, BatchTensor):
        return None
    meta = first._meta
    if func is F.gumbel_softmax:  # draws into a contiguous tensor, whatever the layout of its input
        return Layout(meta.shape, contiguous_strides(meta.shape))
    # A GPU's kernel of dropout goes through its input, and not through a new tensor of its shape.
    as_input = func in _FILLING or (func is F.dropout and first.device.type != "cpu")
    return Layout(meta.shape, meta.strides if as_input else torch.empty_like(meta.of_zeros()).stride())


def drawn(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute a random function of rows."""
    spec, right = align((*args, *kwargs.values()))
    if not _draws_by_rows(func, args, kwargs, spec, right) or (func in _BY_VALUE and spec.view.shares.exact):
        return NotImplemented

    features = func in _OF_FEATURES
    # torch adds a dimension before those of a tensor that it takes for a single sample.
    dims = spec.dim + right
    inside = replace(spec, dim=spec.dim + 1) if _BATCHED.get(func, dims) != dims else spec

    def spec_of(shape: tuple[int, ...]) -> Spec | None:
        if features and inside.dim > 1:
            return None  # one draw for each sample and channel
        return inside if len(shape) > inside.dim and shape[inside.dim] == spec.local_size else None

    rows = [localise(value, spec, right) for value in args]
    named = {name: localise(value, spec, right) for name, value in kwargs.items()}
    with placing(spec_of, None if features else _layout_in((*args, *kwargs.values()), func)):
        return wrap(func(*rows, **named), spec)


def dropout(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute F.dropout; of a few rows by a mask of the whole batch, which can be recorded (`may_mask`)."""
    batch, p = args[0], argument(args, kwargs, 1, "p", 0.5)
    draws = type(p) is float and 0 < p < 1 and argument(args, kwargs, 2, "training", True)
    if not draws or not isinstance(batch, BatchTensor) or argument(args, kwargs, 3, "inplace"):
        return drawn(func, args, kwargs)
    rows, meta = batch._local, batch._meta
    if draws_on(rows, meta.spec).type != rows.device.type:  # of offloaded rows: kernels draw otherwise than the CPU's
        return NotImplemented
    if not may_mask(rows, meta.spec, meta.shape) or not is_dense(meta.shape, meta.strides):
        return drawn(func, args, kwargs)
    scaled = mask(meta.spec, meta.shape, meta.strides, rows.stride())
    return BatchTensor(rows * meta.spec.view.shares.recorded(scaled, rows, p), meta.spec)


_FEW = 1 << 16  # entries of a whole batch


def may_mask(rows: Tensor, spec: Spec, shape: Sequence[int]) -> bool:
    """Return True if dropout of rows may draw a mask of the whole batch, of this shape.

    For more rows `drawn` needs less memory, and less time.
    """
    apart = spec.view.rank_stream is not None or spec.view.shares.several
    on_cpu = draws_on(rows, spec).type == "cpu"
    return on_cpu and prod(shape) <= _FEW and not apart and first_of_adjacent(spec) is not None


def mask(
    spec: Spec, shape: Sequence[int], strides: Sequence[int], local_strides: Sequence[int]
) -> Callable[[Tensor, float], Tensor]:
    """Return a function that draws what F.dropout multiplies a batch of this shape and these strides with.

    It returns this rank's rows of it, and raises Outdated if F.dropout would raise an error, draw nothing, or fill
    its mask in another order.
    """
    view, dim, start, size, shape = spec.view, spec.dim, first_of_adjacent(spec), spec.local_size, tuple(shape)

    def draw(rows: Tensor, p: float) -> Tensor:
        if not 0 < p < 1 or rows.stride() != local_strides:
            raise Outdated
        view.drawn += 1
        mask = torch.empty_strided(shape, strides, dtype=rows.dtype, device=rows.device).bernoulli_(1 - p)
        return mask.narrow(dim, start, size).div_(1 - p)  # type: ignore[arg-type]

    return draw


def _draws_by_rows(func: Function, args: Args, kwargs: Kwargs, spec: Spec, right: int) -> bool:
    """Return True if the function draws one number for each entry of the first tensor, independent of other rows."""
    shapes = {value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    if func is F.gumbel_softmax:
        return bool(argument(args, kwargs, 4, "dim", -1) % (spec.dim + right) != spec.dim)
    if func is F.rrelu and argument(args, kwargs, 4, "inplace"):
        return False  # it draws for those below 0 only
    if func is Tensor.bernoulli_ and isinstance(argument(args, kwargs, 1, "p"), Tensor):
        return False  # where a probability of one rank is invalid, the rows before it are written
    if func in _OF_DISTRIBUTIONS:
        return spec.dim == 0 and right == 2
    return len(shapes) == 1


_OF_FEATURES = functions("dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout")
_BATCHED = {F.dropout1d: 3, F.dropout3d: 5}  # numbers of dimensions of several samples
_FILLING = frozenset(functions(FILLING))  # keep the gaps between their entries in memory
_BY_VALUE = functions("poisson binomial rrelu")  # the number of draws depends on the values of all rows
_OF_DISTRIBUTIONS = functions("multinomial")  # the last dimension is the probabilities


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(FRESH), drawn),
    **dict.fromkeys(functions(FILLING), in_place(drawn)),
    F.dropout: dropout,
}
