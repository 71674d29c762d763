"""Rules for attention within each sample, or to a replicated sequence."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.lookup import Function, align, localise, ndim_of, rows_in
from duoka.view.rules.randomness import placing
from duoka.view.tensor.batch import BatchTensor, Rule
from duoka.view.tensor.spec import Spec

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def dot_product(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scaled_dot_product_attention of (..., L, E), (..., S, E) and a mask, the batch among the leading dimensions.

    Dropout is drawn for (..., L, S).
    """
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    common = align(tensors.values())
    if common is None or "query" not in tensors:
        return NotImplemented
    spec, right = common
    if right == 2:
        return _of_queries(func, given, spec)
    if right < 3 or (right == 3 and given.get("enable_gqa")):
        return NotImplemented
    longest = max(ndim_of(value) for value in tensors.values())
    try:
        own = {name: localise(value, spec, right) for name, value in tensors.items()}
    except LookupError:
        return NotImplemented
    drops = placing(lambda shape: spec.at(len(shape) - right) if len(shape) >= right else None)
    with drops if given.get("dropout_p") else nullcontext():
        out = func(**{**given, **own})
    return BatchTensor(out, spec.at(longest - right))


def _of_queries(func: Function, given: dict[str, Any], spec: Spec) -> Any:
    """Compute attention of queries that are rows to replicated keys and values."""
    sides = [given.get("key"), given.get("value"), given.get("attn_mask")]
    if given.get("is_causal") or given.get("dropout_p") or any(isinstance(side, BatchTensor) for side in sides):
        return NotImplemented
    mask = given.get("attn_mask")
    own = {name: spec.view.replicate(given[name]) for name in ("key", "value")}
    try:
        masked = {} if mask is None else {"attn_mask": localise(mask, spec, 2)}
    except LookupError:
        return NotImplemented
    return BatchTensor(func(**{**given, **own, **masked, "query": given["query"]._local}), spec)


_PARAMETERS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_BIASES = ("in_proj_bias", "bias_k", "bias_v", "out_proj_bias")
_WEIGHTS = (*_BIASES, "in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def multi_head(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """multi_head_attention_forward of (L, n, E), (S, n, E), masks of (n, S) or (n * heads, L, S)."""
    given = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    sides = [given["query"], given["key"], given["value"]]
    spec = next((side._spec for side in sides if isinstance(side, BatchTensor)), None)
    if spec is None or spec.dim != 1 or any(ndim_of(side) != 3 for side in sides):
        return NotImplemented
    if any(isinstance(given.get(name), BatchTensor) for name in _WEIGHTS):
        return NotImplemented
    heads = given["num_heads"]
    by_heads = replace(spec, dim=0, inner=spec.inner * heads)
    given.update({name: spec.view.replicate(given[name]) for name in _WEIGHTS if given.get(name) is not None})
    places = dict.fromkeys(("query", "key", "value"), spec) | {"key_padding_mask": spec.at(0)}
    places |= dict.fromkeys(("static_k", "static_v"), by_heads)
    mask = given.get("attn_mask")
    if isinstance(mask, BatchTensor) or (mask is not None and ndim_of(mask) == 3):
        if ndim_of(mask) != 3:
            return NotImplemented
        places["attn_mask"] = by_heads
    rows: dict[int, Tensor] = {}  # torch checks whether query, key and value are one tensor
    try:
        for name, at in places.items():
            value = given.get(name)
            if value is not None:
                if id(value) not in rows:
                    rows[id(value)] = rows_in(value, at, at.dim)
                given[name] = rows[id(value)]
    except LookupError:
        return NotImplemented

    def place(shape: tuple[int, ...]) -> Spec | None:
        if len(shape) == 3:
            return by_heads
        return spec.at(0) if len(shape) == 4 else None

    draws = given["dropout_p"] and given.get("training", True)
    with placing(place) if draws else nullcontext():
        out, weights = func(**given)
    return BatchTensor(out, spec), weights if weights is None else BatchTensor(weights, spec.at(0))


RULES: dict[Function, Rule] = {
    F.scaled_dot_product_attention: dot_product,
    F.multi_head_attention_forward: multi_head,
}
DRAWING: frozenset[Rule] = frozenset({dot_product, multi_head})
