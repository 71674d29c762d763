"""Checkpointed functions outside of boundaries: what torch keeps and gives back to them is this rank's rows.

torch's `checkpoint` looks inside of the tensors that a function takes and gives. So it is handed a function of
rows, which makes batches of them again, the first time and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.private.torch import TreeSpec, tree_flatten, tree_map, tree_unflatten
from duoka.view.batch import BatchTensor, Spec


def on_rows(
    checkpoint: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`checkpoint(function, *args, **kwargs)` of batches, or of functions that give some."""
    places, named = tree_map(_spec_of, (args, kwargs))
    made: list[tuple[list[Spec | None], TreeSpec]] = []

    def of_rows(*rows: Any, **others: Any) -> tuple[Any, ...]:
        whole = [tree_map(_batch, own, place) for own, place in zip(rows, places, strict=True)]
        out = function(*whole, **{name: tree_map(_batch, own, named[name]) for name, own in others.items()})
        leaves, tree = tree_flatten(out)
        made.append(([_spec_of(leaf) for leaf in leaves], tree))
        return tuple(map(_rows, leaves))

    rows, others = tree_map(_rows, (args, kwargs))
    found = checkpoint(of_rows, *rows, **others)
    specs, tree = made[0]
    return tree_unflatten(list(map(_batch, found, specs)), tree)


def _spec_of(leaf: Any) -> Spec | None:
    return leaf._spec if isinstance(leaf, BatchTensor) else None


def _rows(leaf: Any) -> Any:
    return leaf._local if isinstance(leaf, BatchTensor) else leaf


def _batch(rows: Any, spec: Spec | None) -> Any:
    return rows if spec is None else BatchTensor(rows, spec)
