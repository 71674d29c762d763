"""The rules: what each torch function computes on rows. One family per file, one line per family.

A rule takes (function, args, kwargs) and returns the result, or NotImplemented (or raises `NotByRows`) if it does not
apply: then the batches are gathered and the operation is computed whole. Later families win where two name the same
function.
"""

from __future__ import annotations

from duoka.view.rules import (
    apart,
    attention,
    batch_norm,
    blocks,
    facts,
    gradients,
    indexing,
    lists,
    losses,
    pointwise,
    products,
    randomness,
    recurrent,
    reductions,
    shapes,
)
from duoka.view.tensor.batch import BatchTensor, Traits

FAMILIES = (
    pointwise,
    reductions,
    shapes,
    indexing,
    blocks,
    products,
    batch_norm,
    apart,
    attention,
    recurrent,
    losses,
    randomness,
    lists,
    facts,
    gradients,
)


def install() -> None:
    """Install the rules in BatchTensor."""
    BatchTensor.rules = {func: rule for family in FAMILIES for func, rule in family.RULES.items()}
    once = {rule for family in (facts, gradients, lists, shapes) for rule in family.ONCE_FOR_ALL_SHARES}
    draws = {*randomness.RULES.values(), *attention.RULES.values(), recurrent.layers}
    unrecorded = {*facts.RULES.values(), *gradients.RULES.values()}
    views = {*shapes.RULES.values(), indexing.getitem, pointwise.contiguous, facts.data}
    models = products, batch_norm, attention, recurrent, losses
    computes = {rule for family in models for rule in family.RULES.values()}
    sets = once, draws, unrecorded, views, computes
    BatchTensor.traits = {rule: Traits(*(rule in of for of in sets)) for rule in BatchTensor.rules.values()}
