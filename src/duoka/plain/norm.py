"""BatchNorm uses the whole batch's statistics, but for TorchScript, which reads the source of what is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.private.torch import FRAMES_UP
from duoka.view.batch import BatchTensor, join
from duoka.view.cut import Cut
from duoka.view.norm import Normalising, in_training, whole_batch_norm


def install(session: Session) -> None:
    """Intercept `F.batch_norm`, and `torch.jit.script` and `trace`, for which torch's functions are its own."""

    def make_script(original: Callable[..., Any]) -> Callable[..., Any]:
        def script(*args: Any, **kwargs: Any) -> Any:
            if original.__name__ == "script":  # it looks for names in its caller's frame, which is one further up
                kwargs[FRAMES_UP] = kwargs.get(FRAMES_UP, 0) + 1
            with session.patches.functions_put_back(), session.boundary.computed_whole():
                return original(*args, **kwargs)

        return script

    if session.plan.batch_norm == "whole":
        session.patches.replace(
            F, "batch_norm", lambda original: in_training(original, partial(_whole_batch, session))
        )
    for name in ("script", "trace"):
        session.patches.replace(torch.jit, name, make_script)


def _whole_batch(session: Session, call: Normalising) -> Tensor | None:
    """With the whole batch's statistics; None where all of its rows are here."""
    own, given = session.view.own, call.rows
    found = _rows_of(given, session)
    if found is None:
        return None
    rows, cut = found
    counts = _counts(cut.sizes, rows[0].numel() // rows[0].shape[1] // cut.rows, rows[0].device)
    if not isinstance(given, BatchTensor):
        return whole_batch_norm(call, rows, [call.weight], [call.bias], counts, own)[0]
    weights, biases = (_entered(value, session) for value in (call.weight, call.bias))
    out = whole_batch_norm(call, rows, weights, biases, counts, own)
    return join([BatchTensor(part, share._spec) for part, share in zip(out, given._shares, strict=True)])


def _entered(value: Tensor | None, session: Session) -> list[Tensor | None]:
    """What stands for a parameter in each of the own shares."""
    own = session.view.own
    return own.each(lambda place: None if value is None else own.views[place].enter(value))


def _rows_of(values: Tensor, session: Session) -> tuple[list[Tensor], Cut] | None:
    """This rank's rows and their cut, inside of a boundary or of a batch tensor; None where all rows are here."""
    if isinstance(values, BatchTensor):
        spec = values._spec
        return ([share._local for share in values._shares], spec.cut) if (spec.dim, spec.outer) == (0, 1) else None
    inside = session.boundary.inside
    if inside is None or inside.cut is None:
        return None
    if session.view.own.exact:
        raise Refused(
            "BatchNorm is called inside of a model as it was not at first, where shares cannot meet; run this script "
            "without --strategy exact"
        )
    return [values], inside.cut


@lru_cache(maxsize=256)
def _counts(sizes: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """How many values a channel has on each rank."""
    return torch.tensor(sizes, device=device) * each
