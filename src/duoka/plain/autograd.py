"""Backward passes and hooks on leaves: gradients are those of the whole batch, as on one device.

In a backward pass each rank has its own part of the gradient of a parameter, or another tensor that all ranks hold.
The mean over ranks is the whole one (view/shares/differentiable.py); it is taken before a hook is called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from duoka.plain.constructors import returning_whole
from duoka.plain.session import Session
from duoka.private.torch import accumulates_gradient, transform_level, tree_flatten, tree_unflatten
from duoka.system.user_code import user_line
from duoka.view.rules.gradients import OF_BACKWARD, OF_GRAD, inputs_of_pass, listed, materialized, whole_gradients
from duoka.view.tensor.batch import BatchTensor, batches_in, gather_all, rows_by_share
from duoka.view.transforms import is_tracing, without_modes
from duoka.view.view import View


def install(session: Session) -> None:
    """Intercept `torch.autograd.backward` (also behind `loss.backward()`) and `torch.autograd.grad`."""
    view = session.view

    def recording(how: dict[str, Any]) -> AbstractContextManager[None]:
        records = how.get("create_graph") and transform_level() is None  # a transform takes no hooks
        return session.strategy.recording() if records else nullcontext()

    @session.patches.around(torch.autograd, "backward")
    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batches = batches_in((args, kwargs))
        if batches:  # torch may not call their __torch_function__ (2.10; a default device); it calls this again
            return BatchTensor.__torch_function__(original, (BatchTensor,), args, kwargs)
        args, kwargs = (), dict(zip(OF_BACKWARD, args, strict=False)) | kwargs
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = inputs_of_pass(kwargs["inputs"])
        root = kwargs.get("tensors")
        _write_back_copies(view)
        refuses = isinstance(root, Tensor) and not root.requires_grad  # torch does, before the pass begins
        try:
            with nullcontext() if refuses else session.strategy.backward(user_line()), recording(kwargs):
                original(*args, **kwargs)
            if view.aliased.copies:  # the script may hold rows of a batch's gradient
                view.shares.each(lambda index: view.siblings[index].aliased.gather_stale())
        except Exception as error:
            view.raised(error)
            raise

    @session.patches.around(torch.autograd, "grad")
    def grad(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        how = dict(zip(OF_GRAD, args, strict=False)) | kwargs
        if is_tracing():  # torch.compile makes a graph of the backward pass, of this rank's rows
            return original(*args, **kwargs)
        if how.get("is_grads_batched") and transform_level() is None:
            return _one_by_one(partial(grad, original), how)
        outputs, inputs = how.pop("outputs"), how.pop("inputs")
        _write_back_copies(view)
        with session.strategy.returning(), recording(how):
            # Batches have a rule of their own; torch.func is given whole tensors.
            if batches_in((outputs, inputs)) or transform_level() is not None:
                return original(*args, **kwargs)
            how = gather_all(how)  # a plain tensor may have a batch in `grad_outputs`
            if isinstance(inputs, dict):
                gradients = whole_gradients(outputs, list(inputs.values()), view, **how)
                return dict(zip(inputs, gradients, strict=True))
            return whole_gradients(outputs, listed(inputs), view, **how)


def _write_back_copies(view: View) -> None:
    """Write rows of batches that the script has changed back before a pass reads what autograd has saved."""
    with without_modes():  # a transform refuses writes to tensors that it does not know
        if any(share.aliased.copies for share in view.siblings):
            view.shares.each(lambda index: view.siblings[index].aliased.write_back())
        for share in view.siblings:
            share.saved.count_writes()
            share.saved.copy_split()


def _one_by_one(grad: Callable[..., Any], how: dict[str, Any]) -> Any:
    """Compute `is_grads_batched` with one pass for each: torch cannot vmap over communication in the graph."""
    weights, shape = tree_flatten(how["grad_outputs"])
    filled, names = how.pop("materialize_grads", False), how["inputs"]
    inputs = [*names.values()] if isinstance(names, dict) else listed(names)
    how = {**how, "inputs": inputs, "allow_unused": filled or how.get("allow_unused", False)}
    count = next(len(weight) for weight in weights if weight is not None)
    gradients = []
    for at in range(count):
        weighing = tree_unflatten([None if weight is None else weight[at] for weight in weights], shape)
        retain = how.get("retain_graph") or how.get("create_graph") or at < count - 1
        gradients.append(grad(**{**how, "grad_outputs": weighing, "is_grads_batched": False, "retain_graph": retain}))
    totals = tuple(map(_stacked, zip(*gradients, strict=True)))
    if filled:
        totals = materialized(totals, inputs, bool(how.get("create_graph")))
    return dict(zip(names, totals, strict=True)) if isinstance(names, dict) else totals


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = next((part for part in parts if part is not None), None)
    return there if there is None else torch.stack([torch.zeros_like(there) if p is None else p for p in parts])


def install_hooks(session: Session) -> None:
    """Intercept `Tensor.register_hook` and `retain_grad`."""

    @session.patches.around(Tensor, "register_hook")
    def register_hook(original: Callable[..., Any], self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        session.strategy.read_in_pass()
        of_shares = isinstance(self, BatchTensor) and self._spec.view.shares.several and self.requires_grad
        if (self.is_leaf and of_shares) or (
            not isinstance(self, BatchTensor) and (self.is_leaf or is_scripts_own(hook))
        ):
            return session.strategy.register_hook(self, hook if of_shares else returning_whole(hook))
        return original(self, hook)

    @session.patches.around(Tensor, "retain_grad")
    def retain_grad(original: Callable[[Tensor], None], self: Tensor) -> None:
        plain = not isinstance(self, BatchTensor)
        if plain and self.requires_grad and not self.is_leaf and not self.retains_grad:
            session.strategy.register_hook(self, lambda _: None)
        original(self)


def install_hooks_after_accumulation(session: Session) -> None:
    """Call hooks of `register_post_accumulate_grad_hook` on parameters when the pass is over.

    Only then the gradients are whole. The order is that in which the pass has computed them, as on one device.
    """
    hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # leaf -> its hooks
    due: dict[int, Tensor] = {}  # leaves by identity

    def passed(place: Callable[[Tensor], int | None]) -> None:
        places = [(at, leaf) for leaf in [*hooks][::-1] if (at := place(leaf)) is not None]
        for _, leaf in sorted(places, key=lambda of: of[0]):
            due[id(leaf)] = leaf

    session.strategy.observe(passed)

    depth = 0

    @session.patches.around(torch.autograd, "backward")
    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        how = dict(zip(OF_BACKWARD, args, strict=False)) | kwargs
        if isinstance(how.get("inputs"), Iterator):
            how["inputs"] = [*how["inputs"]]
        depth += 1
        try:
            try:
                original(**how)
            finally:
                # A pass inside another one belongs to that one. Also due is what a pass that failed has added.
                if depth == 1:
                    call_hooks(**how)
        finally:
            depth -= 1
            if depth == 0:
                due.clear()  # after a hook that failed

    def call_hooks(inputs: Tensor | Sequence[Tensor] | None = None, create_graph: bool = False, **_: Any) -> None:
        # Of a pass that begins at a batch, inputs are the shards of parameters.
        wanted = None if inputs is None else {id(rows) for leaf in listed(inputs) for rows in rows_by_share(leaf)}
        with torch.set_grad_enabled(create_graph):  # as in the pass
            while due:
                leaf = due.pop(next(iter(due)))
                if wanted is not None and id(rows_by_share(leaf)[0]) not in wanted:
                    continue  # fsdp computes the gradients of a whole block
                for hook in [*hooks[leaf].values()]:
                    if hook(leaf) is not None:
                        raise RuntimeError("Tensor post accumulate grad hooks should return None.")  # as torch does

    @session.patches.around(Tensor, "register_post_accumulate_grad_hook")
    def register(original: Callable[..., Any], self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        session.strategy.read_in_pass()
        of_torch = session.ranks.world_size == 1 or session.view.shares.exact  # gradients are whole
        if of_torch or not self.requires_grad or type(self) is BatchTensor:
            return original(self, hook)
        if not accumulates_gradient(self):
            return original(self, hook)
        session.strategy.read_each_pass(self)
        of_leaf = hooks.setdefault(self, OrderedDict())
        handle = RemovableHandle(of_leaf)
        of_leaf[handle.id] = hook
        return handle


def is_scripts_own(hook: Any) -> bool:
    """Return True if a hook is neither torch's nor duoka's."""
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "duoka."))
