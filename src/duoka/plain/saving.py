"""Write files of `torch.save`, weights and checkpoints on rank 0; the others wait until they exist.

Files saved by another thread of the script are written by rank 0's thread, and no rank waits.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint import checkpoint
from duoka.checkpoint import saving as weights
from duoka.checkpoint.pickled import NotSharded, sharded_in, write_together
from duoka.checkpoint.sharded import is_sharded, local_rows
from duoka.plain.session import Session
from duoka.private.torch import SAFETENSORS_FLATTEN, tree_leaves, tree_map_only
from duoka.view.dispatch.whole import gather_sharing
from duoka.view.rules.facts import make_address_in_parameter
from duoka.view.tensor.batch import BatchTensor, batches_in


def install(session: Session) -> None:
    """Intercept functions that write files without `open`; set the ranks of duoka's own checkpoints and weights."""

    def once(action: Callable[[], Any]) -> Any:
        if session.caller.is_other_thread():
            return action() if session.ranks.rank == 0 else None
        if session.caller.may_communicate():
            session.ranks.barrier()  # the other ranks may still read the file that is replaced
        return session.first(action)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            to_path = isinstance(f, (str, os.PathLike))
            if session.view.has_sharded and to_path and not args and not kwargs and _save_together(session, obj, f):
                return
            if session.view.has_sharded and to_path:
                obj = _gathered(obj, session.ranks.rank == 0)
            elif batches_in(obj):
                obj = gather_sharing(obj)
            if not to_path:  # a buffer or an open file is each rank's own
                original(obj, f, *args, **kwargs)
                return
            if session.view.has_sharded and any(isinstance(leaf, nn.Module) for leaf in tree_leaves(obj)):
                pickled = io.BytesIO()  # by all ranks: gathering is a collective
                original(obj, pickled, *args, **kwargs)

                def write(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
                    with io.FileIO(f, "w") as file:
                        file.write(pickled.getbuffer())
            else:
                write = original
            if session.caller.is_other_thread() or session.caller.may_communicate():
                session.caller.written.add(os.path.abspath(f))  # reading it waits for rank 0
            once(lambda: write(obj, f, *args, **kwargs))

        return save

    def make_once(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: once(lambda: original(*args, **kwargs))

    session.patches.replace(torch, "save", make)
    session.patches.replace(torch.jit.ScriptModule, "save", make_once)
    session.patches.replace(torch.autograd.profiler.profile, "export_chrome_trace", make_once)
    there = find_spec("safetensors") is not None
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if name in sys.modules or (name == "safetensors" and there):
            session.patches.replace(import_module(name), "serialize_file", make_once)
    if session.view.has_sharded:
        install_safetensors(session)
    for space in (checkpoint, weights):
        session.patches.put(space, "ranks_here", lambda: session.ranks)


def install_safetensors(session: Session) -> None:
    """Intercept the functions of `safetensors.torch`, which read a tensor's memory by its address.

    That of a batch or of a sharded parameter is a part of it. Libraries that write such files compare addresses.
    """
    session.patches.replace(Tensor, "data_ptr", partial(make_address_in_parameter, session.view))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_whole(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, nn.Module):
                if not batches_in(list(tensors.parameters())):
                    return original(tensors, *args, **kwargs)
                names = partial(_gathered, tensors.state_dict())
                module = SimpleNamespace(state_dict=names, load_state_dict=tensors.load_state_dict)
                return original(module, *args, **kwargs)
            return original(_gathered(tensors), *args, **kwargs)

        return of_whole

    if find_spec("safetensors") is not None:
        space = import_module("safetensors.torch")
        for name in ("save", "save_file", "save_model", *SAFETENSORS_FLATTEN):
            if hasattr(space, name):
                session.patches.replace(space, name, make)
        session.patches.replace(space, "load_model", _loading_rows)


def _loading_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `load_model` that looks for tied parameters of a sharded model among this rank's rows.

    It maps the file on the CPU, whatever the device, so that only the rows are copied there.
    """

    def load_model(model: nn.Module, filename: Any, strict: bool = True, device: Any = "cpu", **more: Any) -> Any:
        if not batches_in(list(model.parameters())):
            return original(model, filename, strict, device, **more)

        def rows() -> dict[str, Tensor]:
            return {name: local_rows(value) for name, value in model.state_dict().items()}

        named = type(type(model).__name__, (SimpleNamespace,), {})  # for error messages
        stand_in = named(state_dict=rows, load_state_dict=model.load_state_dict)
        return original(stand_in, filename, strict, "cpu", **more)

    return load_model


def _save_together(session: Session, obj: Any, path: Any) -> bool:
    """Let all ranks write their rows into a file of `torch.save`; returns False if that is not possible."""
    if session.caller.is_other_thread() or not session.caller.may_communicate():
        return False
    tree = tree_map_only(BatchTensor, lambda batch: batch if is_sharded(batch) else _gathered(batch), obj)
    try:
        if not sharded_in(tree) or not session.first(lambda: _is_plain(path)):
            return False
    except NotSharded:
        return False
    session.ranks.barrier()  # the other ranks may still read the file that is replaced
    session.caller.written.add(os.path.abspath(path))  # reading it waits for rank 0
    write_together(tree, path, session.ranks, session.first)
    return True


def _is_plain(path: Any) -> bool:
    """Return True for a regular file, or none; asks the system, as functions of os.path are intercepted."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _gathered(tree: Any, keeps: bool = True) -> Any:
    """Return `tree` with each batch gathered to the CPU, tied ones once. Without `keeps` the results are dropped."""
    known: dict[Any, Tensor] = {}

    def gathered(batch: BatchTensor) -> Tensor:
        rows = batch.to_local()
        key = batch._spec, rows.data_ptr(), rows.shape, rows.stride(), rows.dtype
        if key not in known:
            full = batch.full_tensor().detach()
            known[key] = full.cpu() if keeps else full.new_empty(0)
        return known[key]

    return tree_map_only(BatchTensor, gathered, tree)
