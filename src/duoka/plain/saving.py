"""`torch.save` to a file, weights and checkpoints: rank 0 writes, and the others go on when it is there.

What a thread of the script's saves, rank 0's does, and nobody waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from duoka.checkpoint import checkpoint
from duoka.checkpoint import saving as weights
from duoka.plain.session import Session
from duoka.view.batch import batches_in, gather_all


def install(session: Session) -> None:
    """Intercept what writes files without `open`; tell duoka's own checkpoints and weights who the ranks are."""

    def once(action: Callable[[], Any]) -> Any:
        if session.caller.is_elsewhere():
            return action() if session.ranks.rank == 0 else None
        if session.caller.is_free():
            session.ranks.barrier()  # what others still read is not written over
        return session.first(action)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if batches_in(obj):
                obj = gather_all(obj)
            if not isinstance(f, (str, os.PathLike)):  # a buffer or an open file is each rank's own
                original(obj, f, *args, **kwargs)
                return
            if session.caller.is_elsewhere() or session.caller.is_free():
                session.caller.written.add(os.path.abspath(f))  # whoever reads it waits for rank 0
            once(lambda: original(obj, f, *args, **kwargs))

        return save

    def make_once(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: once(lambda: original(*args, **kwargs))

    session.patches.replace(torch, "save", make)
    session.patches.replace(torch.jit.ScriptModule, "save", make_once)
    session.patches.replace(torch.autograd.profiler.profile, "export_chrome_trace", make_once)
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if name in sys.modules or (name == "safetensors" and find_spec(name)):
            session.patches.replace(import_module(name), "serialize_file", make_once)
    for space in (checkpoint, weights):
        session.patches.put(space, "ranks_here", lambda: session.ranks)
