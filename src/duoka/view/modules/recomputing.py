"""Checkpointed functions of batches: what torch keeps and gives back to them is this process's rows.

torch's `checkpoint` looks inside of the tensors that a function takes and gives. So it is handed a function of
rows, which makes batches of them again, the first time and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duoka.private.torch import TreeSpec, tree_flatten, tree_unflatten
from duoka.view.tensor.batch import BatchTensor, Meta, batches_in, join

_Kinds = list[tuple[Meta, ...]]  # of each leaf: that of each own share; none of what is no batch


def on_rows(
    checkpoint: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`checkpoint(function, *args, **kwargs)` of batches, or of functions that give some."""
    named = {name: value for name, value in kwargs.items() if batches_in(value)}
    others = {name: value for name, value in kwargs.items() if name not in named}
    leaves, tree = tree_flatten((args, named))
    rows, kinds = _apart(leaves)
    made: list[tuple[_Kinds, TreeSpec]] = []

    def of_rows(*rows: Any, **others: Any) -> tuple[Any, ...]:
        args, named = tree_unflatten(_together(rows, kinds), tree)
        out, shape = tree_flatten(function(*args, **named, **others))
        found, of = _apart(out)
        made.append((of, shape))
        return tuple(found)

    found = checkpoint(of_rows, *rows, **others)
    of, shape = made[0]
    return tree_unflatten(_together(found, of), shape)


def _apart(leaves: Sequence[Any]) -> tuple[list[Any], _Kinds]:
    """The leaves with each batch replaced by the rows of the own shares, and what makes batches of these again."""
    rows: list[Any] = []
    kinds: _Kinds = []
    for leaf in leaves:
        shares = leaf._shares if isinstance(leaf, BatchTensor) else ()
        rows += [share._local for share in shares] if shares else [leaf]
        kinds.append(tuple(share._meta for share in shares))
    return rows, kinds


def _together(rows: Sequence[Any], kinds: _Kinds) -> list[Any]:
    """The leaves that `_apart` was given."""
    pending = iter(rows)
    # No leaf of the script's, whose gradient would have to be divided, though it may be one for torch.
    return [
        join([BatchTensor._made(next(pending), meta) for meta in metas]) if metas else next(pending)
        for metas in kinds
    ]
