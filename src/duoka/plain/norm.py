"""BatchNorm with the whole batch's statistics."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.plain.session import Session
from duoka.view.shares.batch_norm import BatchNormCall, in_training, whole_batch_norm
from duoka.view.tensor.batch import BatchTensor, join


def install(session: Session) -> None:
    """Intercept `F.batch_norm`."""
    of_batch = partial(_whole_batch if session.plan.batch_norm == "whole" else _each_share, session)
    session.patches.replace(F, "batch_norm", lambda original: in_training(original, of_batch))


def _whole_batch(session: Session, call: BatchNormCall) -> Tensor | None:
    """Normalise with the whole batch's statistics; return None if all of its rows are here."""
    batch = call.rows
    if not isinstance(batch, BatchTensor) or batch._spec.dim != 0:
        return None
    rows = [share._local for share in batch._shares]
    partition = batch._spec.partition
    counts = _counts(partition.sizes, rows[0].numel() // rows[0].shape[1] // partition.rows, rows[0].device)
    weights, biases = (_replicated(value, session) for value in (call.weight, call.bias))
    shares = batch._spec.view.shares  # of a sharded parameter under hsdp: those of this machine
    out = whole_batch_norm(call, rows, weights, biases, counts, shares)
    return join([BatchTensor(part, share._spec) for part, share in zip(out, batch._shares, strict=True)])


def _each_share(session: Session, call: BatchNormCall) -> Tensor | None:
    """Normalise with the statistics of each share's rows; the running ones follow this rank's first share."""
    batch = call.rows
    if not isinstance(batch, BatchTensor) or batch._spec.dim != 0:
        return None
    weights, biases = (_replicated(value, session) for value in (call.weight, call.bias))
    out = []
    for index, share in enumerate(batch._shares):
        mean, var = (None, None) if index else (call.running_mean, call.running_var)
        rows = F.batch_norm(share._local, mean, var, weights[index], biases[index], True, call.momentum, call.eps)
        out.append(BatchTensor(rows, share._spec))
    return join(out)


def _replicated(value: Tensor | None, session: Session) -> list[Tensor | None]:
    """Return a parameter as it is used in each of the own shares."""
    shares = session.view.shares
    return shares.each(lambda index: None if value is None else session.view.siblings[index].replicate(value))


@lru_cache(maxsize=256)
def _counts(sizes: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """Return the number of values per channel on each rank."""
    return torch.tensor(sizes, device=device) * each
