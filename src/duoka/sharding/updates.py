"""An optimizer's step, which torch computes element by element: each rank updates its rows of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from duoka.sharding.parameter import Sharded
from duoka.view.tensor.batch import BatchTensor
from duoka.view.transforms import operators_are_observed


def update_rows(update: Callable[..., None], *lists: Any, **options: Any) -> None:
    """Compute a step with the rows of sharded parameters, of their gradients and of their states.

    update: torch's function of one parameter after another. Given the sharded parameters, it would call some ten
    functions of batches for each. lists: as it takes them: parameters, gradients, states; None, or a list that is
    empty, where the optimizer has none. It may put new states into them.
    """
    members = [*zip(*(values for values in lists if values), strict=True)]
    by_rows = not (torch.is_grad_enabled() or options.get("has_complex") or operators_are_observed())
    if not (by_rows and all(map(_has_rows_alike, members))):
        update(*lists, **options)
        return
    sharded = [parameter for parameter, *_ in members if isinstance(parameter, Sharded)]
    every = list(dict.fromkeys(parameter._block.blocks for parameter in sharded))
    for blocks in every:
        blocks.write_back()
        blocks.add_deferred()
    rows = [[_rows_of(value) for value in values] if values else values for values in lists]
    try:
        update(*rows, **options)
    finally:
        for blocks in every:
            blocks.view.written += 1  # whole parameters that were gathered before are out of date
    for blocks in every:
        blocks.views.update()
    for values, after in zip(lists, rows, strict=True):
        for index, (parameter, gradient, *_) in enumerate(members if values else ()):
            if values[index] is None and after[index] is not None:
                meta = gradient._meta if isinstance(parameter, Sharded) else None
                values[index] = BatchTensor(after[index], meta.spec, meta.strides) if meta else after[index]


def _has_rows_alike(belonging: Sequence[Any]) -> bool:
    """Return True if a parameter, its gradient and its states are whole, or have rows of the same samples.

    And if the script holds no copies of them, which share their memory on one device.
    """
    parameter, *others = belonging
    if not isinstance(parameter, Sharded):
        return not any(isinstance(other, BatchTensor) for other in others)
    spec = parameter._meta.spec
    batches = [each for each in belonging if isinstance(each, BatchTensor)]
    aliased = spec.view.aliased
    # Of other memory a rank may have copies that are garbage, and another none.
    if spec.view.device is not None or (aliased.copies and any(aliased.of_memory(each._rows) for each in batches)):
        return False
    plain = (other for other in others if other is not None and not isinstance(other, BatchTensor))
    return all(batch._meta.spec == spec for batch in batches) and not any(other.dim() for other in plain)


def _rows_of(value: Any) -> Any:
    if isinstance(value, Sharded):
        return value._shard._rows
    return value._rows if isinstance(value, BatchTensor) else value
