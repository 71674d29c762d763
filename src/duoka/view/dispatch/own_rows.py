"""Functions without a rule, called with this rank's rows: `--row-independent` names them.

The user says that they compute each row by itself. Nothing is proven here; `duoka prove` compares the numbers
with one device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.private.torch import tree_map_only
from duoka.system.user_code import user_line
from duoka.view.rules.draws import SeededMode
from duoka.view.rules.lookup import same_rows
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs, MultiShareBatch, batches_in, call_each_share
from duoka.view.tensor.spec import Spec
from duoka.view.whole import compute_whole

OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))  # with overloads; an overload


def compute_opaque(names: Sequence[str], func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Call a function that no rule describes: on own rows if the user named it, else whole.

    names: those of the function, the first to be shown.
    """
    view = batches_in((args, kwargs))[0]._spec.view
    name = view.row_independent.name_of(names)
    if name is None:
        return compute_whole(func, args, kwargs, names[0])
    return on_own_rows(name, func, args, kwargs)


def on_own_rows(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs, draws: bool = True) -> Any:
    """Call `func` with this rank's rows of each batch, and make batches of its outputs. draws: whether it may draw.

    Raises:
        Refused: the batches do not hold the same samples in the same dimension, an output does not hold this rank's
            rows, or `func` draws random numbers.
    """
    batches = batches_in((args, kwargs))
    spec = batches[0]._spec
    if type(batches[0]) is MultiShareBatch:
        return call_each_share(partial(on_own_rows, name, func), args, kwargs)
    try:
        if any(batch._spec.dim != spec.dim or not same_rows(batch._spec, spec) for batch in batches):
            raise Refused(f"{_named(name)} was given batches that do not hold the same samples in one dimension")
        by_rows = {id(batch._local): batch for batch in batches}
        rows, named = tree_map_only(Tensor, partial(_local, spec), (args, kwargs))
        with SeededMode(partial(_refuse_draw, name)) if draws else nullcontext():
            out = func(*rows, **named)

        def batch_of(tensor: Tensor) -> BatchTensor:
            return by_rows[id(tensor)] if id(tensor) in by_rows else _batch(name, tensor, spec)

        return tree_map_only(Tensor, batch_of, out)
    except Exception as error:
        spec.view.raised(error)
        raise


def _local(spec: Spec, tensor: Tensor) -> Tensor:
    return tensor._local if isinstance(tensor, BatchTensor) else spec.view.replicate(tensor)


def _refuse_draw(name: str, operator: Any, args: Args, kwargs: Kwargs) -> Any:
    raise Refused(
        f"{_named(name)} draws random numbers ({operator}): these depend on all rows, so leave its name out"
    )


def _batch(name: str, tensor: Tensor, spec: Spec) -> BatchTensor:
    if tensor.dim() <= spec.dim or tensor.shape[spec.dim] != spec.local_size:
        raise Refused(
            f"{_named(name)} gave a tensor of shape {tuple(tensor.shape)} for {spec.local_size} rows of a batch: its "
            f"dimension {spec.dim} does not hold them, so leave its name out"
        )
    return BatchTensor(tensor, spec)


def _named(name: str) -> str:
    return f"{name} at {user_line()}, which --row-independent names,"


def names_of_class(kind: type) -> tuple[str, ...]:
    """Return the names of a class: `Scan`, `Outer.Scan`, `train.Outer.Scan`."""
    return kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"


def names_of_module(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class; of a scripted module, the name of the class that was scripted."""
    original = getattr(module, "original_name", None)
    return (original,) if original else names_of_class(type(module))


def names_of_operator(func: Any) -> tuple[str, ...]:
    """Return the name of an operator, `mylib::square`, from that of its overload, `mylib.square.default`."""
    return ("::".join(str(func).split(".")[:2]),)
