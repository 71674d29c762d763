"""Scale gradients within models that compute in float16, in which small gradients would vanish.

A gradient is multiplied where it enters a model's outputs, and divided where it leaves the model, at parameters and
inputs. So outside of the model every gradient is unscaled: clipping needs no unscaling. The method is Micikevicius et
al., "Mixed precision training" (2018); torch.amp.GradScaler scales the loss instead, and so all other gradients, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from duoka.errors import Refused
from duoka.private.torch import FLAT_WEIGHTS, parameters_in, tree_map_only
from duoka.view.sharded import Sharded
from duoka.view.shares.differentiable import GATHERED, ScaleOnce
from duoka.view.support.originals import register_hook
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.contents import Contents
from duoka.view.tensor.graph import graph, node_of

FIRST = 2.0**15  # a gradient of 1 times this is finite in float16
STEPS_TO_GROW = 2000
IN_VAIN = 50  # steps skipped in a row, after which a line is printed


class GradientScale:
    """The scale of gradients within the models of one run.

    An optimizer step with an infinite or NaN gradient is skipped, and the scale is halved; after 2000 other steps it
    is doubled. Gradients are equal on all ranks, so all decide alike.

    value: the current scale. say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.value, self._good, self._left_out = FIRST, 0, 0
        self._say = say
        self._inside = False
        self._calls = 0
        self._scaled: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the parameters of models in float16
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}  # gradients hidden from a skipped step
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def __deepcopy__(self, memo: Any) -> GradientScale:
        """Return itself: a copy of a model belongs to the same run."""
        return self

    def __reduce__(self) -> Any:
        """Pickle as None: in another process a model belongs to no run, and computes with autocast alone."""
        return _no_scale, ()

    def state_dict(self) -> dict[str, float]:
        """Return the state, for checkpoints."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict()` returned."""
        self.value, self._good = float(state["value"]), int(state["good"])

    def close(self) -> None:
        """Remove the hooks of optimizers."""
        for hook in self._hooks:
            hook.remove()

    # --- in the model

    def around(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call `forward(*args, **kwargs)`, the forward pass of `module`, and scale gradients within it.

        Raises:
            Refused: gradients would leave the model by another way than its parameters and inputs.
        """
        if self._inside:
            return forward(*args, **kwargs)
        entries: list[Tensor] = []

        def entering(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            entries.append(_times(tensor, 1 / self.value))
            return entries[-1]

        args, kwargs = tree_map_only(Tensor, entering, (args, kwargs))
        parameters = list(module.parameters())
        sharded = {id(one._block.blocks): one._block.blocks for one in parameters if isinstance(one, Sharded)}
        table = {id(one): entering(one) for one in parameters if not isinstance(one, Sharded)}
        self._scaled.update(dict.fromkeys(parameters))
        self._inside = True
        try:
            with _in_place(module, table), ExitStack() as scaled:
                for blocks in sharded.values():
                    scaled.enter_context(blocks.scaling(1 / self.value))
                contents = Contents(forward(*args, **kwargs))
        finally:
            self._inside = False
        self._calls += 1
        if not self._calls & (self._calls - 1):
            _check_ways(contents.leaves, entries, module)
        return contents.put([self._leaving(leaf) for leaf in contents.leaves])

    def _leaving(self, leaf: Any) -> Any:
        """Scale an output's gradient on its way into the model; the output's own .grad stays unscaled."""
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        scaled = _times(leaf, self.value)
        return scaled.view_as(scaled)

    # --- in optimizers

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(parameter in self._scaled for parameter in parameters):
            return
        if args[1:] or kwargs.get("closure") is not None:
            raise Refused(
                f"{type(optimizer).__name__}.step(closure) at {user_line()} computes gradients itself, so a step "
                "whose gradients overflow float16 cannot be skipped; use precision='bf16'"
            )
        found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        finite = not found or math.isfinite(
            torch.nn.utils.get_total_norm([gradient for _, gradient in found], norm_type=math.inf).item()
        )
        self._update(finite)
        if not finite:
            self._kept[id(optimizer)] = found
            for parameter, _ in found:
                parameter.grad = None  # an optimizer then skips the parameter and its state

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._kept.pop(id(optimizer), []):
            parameter.grad = gradient

    def _update(self, finite: bool) -> None:
        if not finite:
            self.value, self._good, self._left_out = self.value / 2, 0, self._left_out + 1
            if self._left_out == IN_VAIN:
                self._say(
                    f"{IN_VAIN} steps in a row were left out, as gradients are not finite whatever their scale "
                    f"({user_line()}): is the loss itself nan or inf?"
                )
            return
        self._good, self._left_out = self._good + 1, 0
        if self._good == STEPS_TO_GROW:
            self.value, self._good = self.value * 2, 0


def _no_scale() -> None:
    return None


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return the same tensor with its gradient multiplied."""
    if isinstance(tensor, BatchTensor):
        return BatchTensor(_times(tensor._local, factor), tensor._spec)
    same = tensor.view_as(tensor)
    register_hook(same, lambda gradient: ScaleOnce.apply(gradient, factor))
    return same


@contextmanager
def _in_place(module: nn.Module, table: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, let the module compute with other tensors in place of its parameters, by their ids."""
    parts = list(module.modules())
    before = [(part, dict(parameters_in(part)), part.__dict__.get(FLAT_WEIGHTS)) for part in parts]
    try:
        for part, parameters, flat in before:
            parameters_in(part).update({name: table.get(id(value), value) for name, value in parameters.items()})  # type: ignore[misc]
            if flat is not None:  # recurrent layers keep a list of theirs
                part.__dict__[FLAT_WEIGHTS] = [table.get(id(value), value) for value in flat]
        yield
    finally:
        for part, parameters, flat in before:
            parameters_in(part).update(parameters)
            if flat is not None:
                part.__dict__[FLAT_WEIGHTS] = flat


def _check_ways(outputs: list[Any], entries: list[Tensor], module: nn.Module) -> None:
    """Check that the outputs were computed from the scaled inputs and parameters only."""
    ends = [node_of(entry) for entry in entries]
    for node in graph(outputs, ends, (GATHERED,)):
        name = node.name()
        if "CheckpointFunction" in name:
            raise Refused("checkpoint(use_reentrant=True) in a model of precision='fp16': use use_reentrant=False")
        if "AccumulateGrad" in name:
            raise Refused(
                f"{type(module).__name__} at {user_line()} computes with a tensor that needs gradients, of shape "
                f"{tuple(node.variable.shape)}, which is neither a parameter nor an input of it: with "
                "precision='fp16' it would get a wrong one; make it a parameter, or use precision='bf16'"
            )
