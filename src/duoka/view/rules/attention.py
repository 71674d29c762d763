"""Rules for attention within each sample, or to a replicated sequence."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.private.torch import safe_softmax
from duoka.view.rules.lookup import align, localise, ndim_of, rows_in, shape_of
from duoka.view.rules.randomness import mask, may_mask, placing
from duoka.view.shares.local import Outdated
from duoka.view.shares.strides import contiguous_strides
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec

SpecOf = Callable[[tuple[int, ...]], Spec | None]  # shape of attention weights -> where the rows are in them

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def dot_product(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """scaled_dot_product_attention of (..., L, E), (..., S, E) and a mask, the batch among the leading dimensions.

    Dropout is drawn for (..., L, S).
    """
    arguments = dict(zip(_NAMES, args, strict=False)) | kwargs
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    spec, right = align(tensors.values())
    if "query" not in tensors or (arguments.get("is_causal") and "attn_mask" in tensors):
        return NotImplemented  # torch raises the error
    if right == 2:
        return _of_queries(func, arguments, spec)
    if right < 3 or (right == 3 and arguments.get("enable_gqa")):
        return NotImplemented
    shapes = [shape_of(tensors[side]) for side in ("query", "key") if side in tensors]
    if not any(len(shape) >= right and shape[-right] == spec.size for shape in shapes):
        return NotImplemented  # the weights have no rows, to which torch adds no mask that has
    longest = max(ndim_of(value) for value in tensors.values())
    local = {name: localise(value, spec, right) for name, value in tensors.items()}

    def spec_of(shape: tuple[int, ...]) -> Spec | None:
        return spec.at(len(shape) - right) if len(shape) >= right else None

    query = local["query"]
    if not arguments.get("dropout_p"):
        out = func(**{**arguments, **local})
    elif _may_mask(spec_of, arguments["dropout_p"], query, (*query.shape[:-1], local["key"].shape[-2])):
        values = [local.get(name, arguments.get(name)) for name in _NAMES]
        out = spec.view.shares.recorded(partial(_in_steps, spec_of), *values)
    else:
        with placing(spec_of):
            out = func(**{**arguments, **local})
    return BatchTensor(out, spec.at(longest - right))


def _of_queries(func: Function, arguments: dict[str, Any], spec: Spec) -> Any:
    """Compute attention of queries that are rows to replicated keys and values."""
    sides = [arguments.get("key"), arguments.get("value"), arguments.get("attn_mask")]
    if (
        arguments.get("is_causal")
        or arguments.get("dropout_p")
        or any(isinstance(side, BatchTensor) for side in sides)
    ):
        return NotImplemented
    attn_mask = arguments.get("attn_mask")
    masked = {} if attn_mask is None else {"attn_mask": localise(attn_mask, spec, 2)}
    return BatchTensor(func(**{**arguments, **masked, "query": arguments["query"]._local}), spec)


_SIGNATURE = inspect.signature(F.multi_head_attention_forward).parameters
_PARAMETERS = {name: parameter.default for name, parameter in _SIGNATURE.items()}
_BIASES = ("in_proj_bias", "bias_k", "bias_v", "out_proj_bias")
_WEIGHTS = (*_BIASES, "in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def multi_head(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """multi_head_attention_forward of (L, n, E), (S, n, E), masks of (n, S) or (n * heads, L, S)."""
    arguments = _PARAMETERS | dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    sides = [arguments["query"], arguments["key"], arguments["value"]]
    spec = next((side._spec for side in sides if isinstance(side, BatchTensor)), None)
    if spec is None or spec.dim != 1 or any(ndim_of(side) != 3 for side in sides):
        return NotImplemented
    if any(isinstance(arguments[name], BatchTensor) for name in _WEIGHTS):
        return NotImplemented
    heads = arguments["num_heads"]
    by_heads = replace(spec, dim=0, inner=spec.inner * heads)
    places = dict.fromkeys(("query", "key", "value"), spec) | {"key_padding_mask": spec.at(0)}
    places |= dict.fromkeys(("static_k", "static_v"), by_heads)
    attn_mask = arguments["attn_mask"]
    if isinstance(attn_mask, BatchTensor) or (attn_mask is not None and ndim_of(attn_mask) == 3):
        if ndim_of(attn_mask) != 3:
            return NotImplemented
        places["attn_mask"] = by_heads
    rows: dict[int, Tensor] = {}  # torch checks whether query, key and value are one tensor
    for name, at in places.items():
        value = arguments[name]
        if value is not None:
            if id(value) not in rows:
                rows[id(value)] = rows_in(value, at, at.dim)
            arguments[name] = rows[id(value)]

    def spec_of(shape: tuple[int, ...]) -> Spec | None:
        if len(shape) == 3:
            return by_heads
        return spec.at(0) if len(shape) == 4 else None

    query, p = arguments["query"], arguments["dropout_p"]
    shape = query.shape[1], heads, query.shape[0], arguments["key"].shape[0]
    if not p or not arguments["training"]:
        out, weights = func(**arguments)
    elif _may_mask(spec_of, p, query, shape):
        out, weights = spec.view.shares.recorded(_with_masks(func, spec_of), *arguments.values())
    else:
        with placing(spec_of):
            out, weights = func(**arguments)
    return BatchTensor(out, spec), weights if weights is None else BatchTensor(weights, spec.at(0))


# Dropout of weights in a mode that sees all of torch's operators takes longer than small models take for the rest. So
# it is recorded as a call that draws a mask by itself.


def _may_mask(spec_of: SpecOf, p: float, rows: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if dropout of weights of this shape may draw a mask (`may_mask`)."""
    spec = spec_of(shape)
    if spec is None or not (0 < p < 1 and _is_full_precision(rows)):
        return False
    return may_mask(rows, spec, (*shape[: spec.dim], spec.size, *shape[spec.dim + 1 :]))


def _is_full_precision(rows: Tensor) -> bool:
    return rows.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def _dropped(spec_of: SpecOf, weights: Tensor, p: float) -> Tensor:
    """Compute dropout of this rank's contiguous rows of attention weights, as one device does for all."""
    spec = spec_of(weights.shape)
    if spec is None:
        raise Outdated
    return weights * _mask(spec, weights.shape)(weights, p)


@lru_cache(maxsize=64)
def _mask(spec: Spec, local: torch.Size) -> Callable[[Tensor, float], Tensor]:
    shape = (*local[: spec.dim], spec.size, *local[spec.dim + 1 :])
    return mask(spec, shape, contiguous_strides(shape), contiguous_strides(local))


def _in_steps(
    spec_of: SpecOf,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention in the steps that torch takes on a CPU if there is dropout."""
    if not _is_full_precision(query):
        raise Outdated
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    factor = math.sqrt(abs(scale))  # of both sides, so that products stay small
    weights = query * math.copysign(factor, scale) @ (key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        weights += attn_mask
    return _dropped(spec_of, safe_softmax(weights, -1), dropout_p) @ value


def _with_masks(func: Function, spec_of: SpecOf) -> Function:
    """Return multi_head_attention_forward with functions that draw masks in the place of those that torch calls."""
    drawing = {
        "dropout": lambda weights, p: _dropped(spec_of, weights, p),
        "scaled_dot_product_attention": partial(_in_steps, spec_of),
    }
    return FunctionType(func.__code__, {**func.__globals__, **drawing})


RULES: dict[Function, Rule] = {
    F.scaled_dot_product_attention: dot_product,
    F.multi_head_attention_forward: multi_head,
}
