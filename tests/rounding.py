"""Whether two results are the same but for rounding. How far rounding goes is measured, never written down.

Other processors and other numbers of ranks add in another order, and the computation decides what becomes of the
last place: a bias before a normalisation has no true gradient, and Adam steps by the noise. So where results differ
by more than a few units in the last place, the reference is computed again from inputs that are moved by one unit.
Each tensor, and each number of a text, may differ TIMES as far as it did there. `duoka prove` does the same
(docs/decisions/0086-rounding.md).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from duoka.proving.recorder import Nudge

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
UNITS = 16  # in the last place of a tensor's largest number: what is no further apart needs no measurement
SEEDS = range(4)
TIMES = 8


class Numbers(NamedTuple):
    """A leaf of a result.

    frame: what must be equal, such as a shape, or a text without its numbers. near: how close needs no measurement.
    """

    frame: Any
    values: Tensor
    near: Tensor


def assert_same(expected: Any, found: Any, again: Callable[[int], Any]) -> None:
    """See that results have equal texts, shapes and whole numbers, and other numbers that differ by rounding alone.

    expected, found: tensors, numbers, texts, and containers of these.
    again: computes the expected result from inputs that are moved by one unit in the last place; called, with the
        seed of the directions, only if a difference has to be measured.
    """
    reference, others = _leaves(expected), _leaves(found)
    assert [leaf.frame for leaf in others] == [leaf.frame for leaf in reference]
    gaps = [_gap(one, other) for one, other in zip(reference, others, strict=True)]
    if all((gap <= leaf.near).all() for gap, leaf in zip(gaps, reference, strict=True)):
        return
    allowed = [leaf.near.clone() for leaf in reference]
    for seed in SEEDS:
        nudged = _leaves(again(seed))
        assert [leaf.frame for leaf in nudged] == [leaf.frame for leaf in reference], "rounding decides more"
        for limit, one, other in zip(allowed, reference, nudged, strict=True):
            gap = TIMES * _gap(one, other)
            torch.maximum(limit, gap if isinstance(one.frame, str) or not gap.numel() else gap.max(), out=limit)
    for number, (gap, limit, one, other) in enumerate(zip(gaps, allowed, reference, others, strict=True)):
        assert (gap <= limit).all(), (
            f"leaf {number}, {one.frame!r}: {other.values[gap > limit]} instead of {one.values[gap > limit]}; "
            f"rounding changes these by {limit[gap > limit]} at most"
        )


def moved(value: Any, seed: int) -> Any:
    """A copy of tensors and modules, in any containers, whose numbers are moved by one unit in the last place."""
    nudge = Nudge(seed)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            module = copy.deepcopy(leaf)
            nudge.move(module.parameters())
            return module
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = leaf.detach().clone()
        nudge.move([tensor])
        return tensor.requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def _leaves(value: Any) -> list[Numbers]:
    return [_numbers(leaf) for leaf in tree_leaves(value)]


def _numbers(leaf: Any) -> Numbers:
    wide = partial(torch.tensor, dtype=torch.float64)
    if isinstance(leaf, str):
        texts = NUMBER.findall(leaf)
        values = wide([float(text) for text in texts])
        near = UNITS * torch.finfo(torch.float32).eps * values.abs() + wide([_last_place(text) for text in texts])
        return Numbers(NUMBER.sub("#", leaf), values, near)
    if isinstance(leaf, float):
        values = wide(leaf)
        return Numbers(float, values, UNITS * torch.finfo(torch.float32).eps * values.abs())
    if not isinstance(leaf, Tensor):
        return Numbers(leaf if isinstance(leaf, (int, type(None))) else type(leaf), wide([]), wide([]))
    leaf = leaf.detach()
    values = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).double()
    inexact = leaf.is_floating_point() or leaf.is_complex()
    largest = values[values.isfinite()].abs().max() if inexact and values.isfinite().any() else wide(0)
    eps = torch.finfo(leaf.dtype).eps if inexact else 0.0
    return Numbers((leaf.shape, leaf.dtype), values, (UNITS * eps * largest).expand_as(values))


def _last_place(text: str) -> float:
    """Of a printed number: two that differ in the last place may have been rounded from next to the same."""
    digits, _, exponent = text.partition("e")
    decimals = len(digits.partition(".")[2])
    return 1.01 * 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


def _gap(one: Numbers, other: Numbers) -> Tensor:
    same = (one.values == other.values) | (one.values.isnan() & other.values.isnan())
    return torch.where(same, 0.0, (one.values - other.values).abs().nan_to_num(torch.inf, torch.inf))
