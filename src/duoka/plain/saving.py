"""Write files of `torch.save`, weights and checkpoints on rank 0; the others wait until they exist.

Files saved by another thread of the script are written by rank 0's thread, and no rank waits.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint import checkpoint
from duoka.checkpoint import saving as weights
from duoka.checkpoint.formats import is_sharded
from duoka.checkpoint.pickled import NotSharded, sharded_in, write_together
from duoka.checkpoint.sharded import local_rows
from duoka.plain.session import Session
from duoka.private.torch import SAFETENSORS_FLATTEN, tree_leaves, tree_map_only
from duoka.sharding.parameter import Sharded
from duoka.system.user_code import after_import
from duoka.view.rules.facts import make_address_in_parameter
from duoka.view.tensor.batch import BatchTensor, batches_in
from duoka.view.whole import gather_sharing


def install(session: Session) -> None:
    """Intercept functions that write files without `open`; set the ranks of duoka's own checkpoints and weights."""
    caller, view, patches = session.caller, session.view, session.patches

    def once(action: Callable[[], Any]) -> Any:
        if caller.is_other_thread():
            return action() if session.ranks.rank == 0 else None
        # The other ranks may still read the file that is replaced.
        return session.once(action) if caller.may_communicate() else session.first(action)

    @patches.around(torch, "save")
    def save(original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        to_path = isinstance(f, (str, os.PathLike))
        together = view.has_sharded and to_path
        if batches_in(obj):
            with ExitStack() as stack:  # offloaded parameters stay on the host: a card may not hold all of them
                for parameters in view.sharded:
                    stack.enter_context(parameters.gathering_on(parameters.device))
                obj = gather_sharing(obj, is_sharded if together else lambda batch: False, _as_parameter)
        if together and not args and not kwargs and _save_together(session, obj, f):
            return
        if together:
            obj = _gathered(obj, session.ranks.rank == 0)
        if not to_path:  # a buffer or an open file is each rank's own
            original(obj, f, *args, **kwargs)
            return
        write = partial(original, obj, f, *args, **kwargs)
        if _holds_batches(obj):
            pickled = io.BytesIO()  # by all ranks: gathering is a collective
            original(obj, pickled, *args, **kwargs)
            write = partial(_write, f, pickled)
        if caller.is_other_thread() or caller.may_communicate():
            caller.written.add(os.path.abspath(f))  # reading it waits for rank 0
        once(write)

    @patches.around(torch.jit.ScriptModule, "save")
    @patches.around(torch.jit.RecursiveScriptModule, "save")  # type: ignore[attr-defined]  # which has its own
    @patches.around(torch.jit.ScriptFunction, "save")
    @patches.around(torch.autograd.profiler.profile, "export_chrome_trace")
    def write_once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return once(lambda: original(*args, **kwargs))

    @patches.around(torch.export, "save")
    def save_exported(original: Callable[..., Any], ep: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        write = partial(original, ep, f, *args, **kwargs)
        once(write) if isinstance(f, (str, os.PathLike)) else write()

    there = find_spec("safetensors") is not None
    for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
        if name in sys.modules or (name == "safetensors" and there):
            patches.around(import_module(name), "serialize_file")(write_once)
    if view.has_sharded:
        install_safetensors(session)
        after_import("torch.distributed.checkpoint.staging", partial(_gather_staged, session))
    for space in (checkpoint, weights):
        patches.put(space, "ranks_here", lambda: session.ranks)


def install_safetensors(session: Session) -> None:
    """Intercept the functions of `safetensors.torch`, which read a tensor's memory by its address.

    That of a batch or of a sharded parameter is a part of it. Libraries that write such files compare addresses.
    """
    patches = session.patches
    patches.replace(Tensor, "data_ptr", partial(make_address_in_parameter, session.view))
    if find_spec("safetensors") is None:
        return
    space = import_module("safetensors.torch")

    @patches.around(
        space, *filter(partial(hasattr, space), ("save", "save_file", "save_model", *SAFETENSORS_FLATTEN))
    )
    def of_whole(original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensors, nn.Module):
            return original(_gathered(tensors), *args, **kwargs)
        if not batches_in(list(tensors.parameters())):
            return original(tensors, *args, **kwargs)
        names = partial(_gathered, tensors.state_dict())
        module = SimpleNamespace(state_dict=names, load_state_dict=tensors.load_state_dict)
        return original(module, *args, **kwargs)

    @patches.around(space, "load_model")
    def load_model(
        original: Callable[..., Any],
        model: nn.Module,
        filename: Any,
        strict: bool = True,
        device: Any = "cpu",
        **how: Any,
    ) -> Any:
        """Load into a sharded model: look for tied parameters among this rank's rows.

        The file is mapped on the CPU, whatever the device, so that only the rows are copied there.
        """
        if not batches_in(list(model.parameters())):
            return original(model, filename, strict, device, **how)

        def rows() -> dict[str, Tensor]:
            return {name: local_rows(value) for name, value in model.state_dict().items()}

        named = type(type(model).__name__, (SimpleNamespace,), {})  # for error messages
        stand_in = named(state_dict=rows, load_state_dict=model.load_state_dict)
        return original(stand_in, filename, strict, "cpu", **how)


def _gather_staged(session: Session, space: Any) -> None:
    """Let rank 0's thread of `async_save`, which writes what is staged, have the values of sharded parameters."""

    @session.patches.around(space.DefaultStager, "stage")
    def stage(original: Callable[..., Any], stager: Any, state_dict: Any, **kwargs: Any) -> Any:
        return original(stager, _gathered(state_dict, session.ranks.rank == 0), **kwargs)


def _save_together(session: Session, obj: Any, path: Any) -> bool:
    """Let all ranks write their rows into a file of `torch.save`; returns False if that is not possible."""
    if session.caller.is_other_thread() or not session.caller.may_communicate():
        return False
    try:
        if not sharded_in(obj) or not session.first(lambda: _is_plain(path)):
            return False
    except NotSharded:
        return False
    session.ranks.barrier()  # the other ranks may still read the file that is replaced
    session.caller.written.add(os.path.abspath(path))  # reading it waits for rank 0
    write_together(obj, path, session.ranks, session.first)
    return True


class _Search(pickle.Pickler):
    """Looks for batches and sharded parameters in what `pickle` reaches: attributes of objects of any class, too."""

    found = False

    def persistent_id(self, obj: Any) -> int | None:
        self.found = self.found or isinstance(obj, BatchTensor)
        return 0 if isinstance(obj, (Tensor, type, FunctionType)) else None  # 0: nothing of it is pickled


def _holds_batches(obj: Any) -> bool:
    """Return whether something in `obj` is to be gathered when it is pickled."""
    if all(isinstance(leaf, (Tensor, int, float, str, NoneType)) for leaf in tree_leaves(obj)):
        return bool(batches_in(obj))
    search = _Search(io.BytesIO())
    with suppress(Exception):  # which torch.save raises
        search.dump(obj)
    return search.found


def _write(path: Any, data: io.BytesIO) -> None:
    with io.FileIO(path, "w") as file:
        file.write(data.getbuffer())


def _as_parameter(batch: BatchTensor, full: Tensor) -> Tensor:
    return nn.Parameter(full.detach(), batch.requires_grad) if isinstance(batch, Sharded) else full


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
        rows, sharded = batch.to_local(), isinstance(batch, Sharded)
        key = sharded, batch._spec, rows.data_ptr(), rows.shape, rows.stride(), rows.dtype
        if key not in known:
            full = batch.full_tensor().detach()
            full = full.cpu() if keeps else full.new_empty(0)
            known[key] = nn.Parameter(full, batch.requires_grad) if sharded else full
        return known[key]

    return tree_map_only(BatchTensor, gathered, tree)
