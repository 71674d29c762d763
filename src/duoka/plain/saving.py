"""`torch.save` to a file, weights and checkpoints: rank 0 writes, and the others go on when it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from duoka.checkpoint import checkpoint
from duoka.checkpoint import saving as weights
from duoka.plain.session import Session
from duoka.view.batch import batches_in, gather_all


def install(session: Session) -> None:
    """Intercept `torch.save`; tell `duoka.Checkpoint` and `duoka.save_weights` who the ranks are."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if batches_in(obj):
                obj = gather_all(obj)
            if not isinstance(f, (str, os.PathLike)):  # a buffer or an open file is each rank's own
                original(obj, f, *args, **kwargs)
                return
            session.first(lambda: original(obj, f, *args, **kwargs))

        return save

    session.patches.replace(torch, "save", make)
    for space in (checkpoint, weights):
        session.patches.put(space, "ranks_here", lambda: session.ranks)
