"""Each rank holds a part of the parameters, gradients and optimizer state of a model, by torch's `fully_shard`.

A block's parameters are gathered before it computes, forwards and backwards, and gradients are averaged over ranks
and sharded again when they are computed. The mean equals that of `Ddp`.

The run's own strategy keeps all other parameters in step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from duoka.errors import OptionError, Refused
from duoka.private.torch import is_view, tree_map_only
from duoka.strategies.fsdp import blocks
from duoka.view.collectives.base import Collectives
from duoka.view.support.kinds import is_sharded
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor


class FullyShard:
    """The sharded models of one run.

    mesh: torch's DeviceMesh of all ranks. device: this rank's. leave: called with each parameter whose gradient torch
    averages. say: prints a line.
    """

    def __init__(
        self,
        ranks: Collectives,
        mesh: Any,
        device: torch.device,
        leave: Callable[[Tensor], None],
        say: Callable[[str], None],
    ) -> None:
        self._ranks, self._mesh, self._device, self._leave, self._say = ranks, mesh, device, leave, say
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # replaced parameter -> its name
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def shard(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Shard `module` with rank 0's parameters, block by block.

        dtype: of gathered parameters; None: their own.

        Raises:
            OptionError: torch does not shard it.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds

        name, inner = type(module).__name__, blocks(module)
        if why := _unfit(module, inner):
            raise OptionError("strategy", "fsdp", f"auto for {name}", why)
        count = sum(parameter.numel() for parameter in module.parameters())
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32, cast_forward_inputs=False
        )
        for part in [*inner, module]:
            self._bring(part, name)
            part.register_forward_hook(_apart)  # before torch's own hook
            try:
                parts = fully_shard(part, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
                parts.unshard()  # tensors allocated in a first call in inference mode could not be trained
                for parameter in part.parameters():
                    if not is_sharded(parameter):
                        self._leave(parameter)
                parts.reshard()
            except (ValueError, NotImplementedError, AssertionError) as error:
                why = f"torch does not shard it: {error}"
                raise OptionError("strategy", "fsdp", f"auto for {name}", why) from None
        module.register_forward_pre_hook(lambda *_: self._ranks.begin_native(f"forward({name})"), prepend=True)
        module.register_forward_hook(lambda *_: self._ranks.end_native(), always_call=True)
        self._say(
            f"strategy fsdp: each rank holds 1/{self._ranks.world_size} of the {count:,} parameters of {name}, of "
            f"which {len(inner)} blocks and the rest come together in turn"
        )

    def close(self) -> None:
        """Remove the hook of optimizers."""
        self._hook.remove()

    def _bring(self, part: nn.Module, model: str) -> None:
        """Move the whole parameters of a part to the device, with rank 0's values, one part at a time."""
        for name, parameter in part.named_parameters():
            if not is_sharded(parameter):
                self._replaced[parameter] = f"{name} of {model}"
                parameter.data = parameter.data.to(self._device).contiguous()
                self._ranks.broadcast_into(parameter, 0)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Raise an error for an optimizer with old parameters, which it would update without effect."""
        if isinstance(optimizer, LBFGS) and any(map(is_sharded, optimizer.param_groups[0]["params"])):
            raise Refused(
                f"LBFGS at {user_line()} makes one vector of all parameters, which no rank has with strategy='fsdp'; "
                "use another optimizer, or another strategy"
            )
        if not self._replaced:  # the usual case: the script keeps none
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._replaced:
                    raise Refused(
                        f"the optimizer that steps at {user_line()} was made before run.model(..., strategy='fsdp'), "
                        f"and holds the old {self._replaced[parameter]}; make it after, of model.parameters()"
                    )


class _Apart(torch.autograd.Function):
    """Return a tensor that is no view, so that writing into it in place leaves torch's hook on its place."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        return view.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _apart(part: nn.Module, args: Any, out: Any) -> Any:
    def apart(tensor: Tensor) -> Tensor:
        if isinstance(tensor, BatchTensor):
            return BatchTensor(apart(tensor._local), tensor._spec)
        return _Apart.apply(tensor) if tensor.requires_grad and is_view(tensor) else tensor

    return tree_map_only(Tensor, apart, out)


def _unfit(module: nn.Module, inner: list[nn.Module]) -> str:
    """Return why torch does not shard a model; empty if it may."""
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            return f"the gradient of {name or 'it'} is sparse; give it sparse=False"
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            return f"{name} is a scalar, which has no parts; give it one dimension"
    in_blocks = {parameter for block in inner for parameter in block.parameters()}
    rest = [parameter for parameter in module.parameters() if parameter not in in_blocks]
    for together in [*(list(block.parameters()) for block in inner), rest]:
        kinds = {str(parameter.dtype)[6:] for parameter in together if parameter.requires_grad}
        if len(kinds) > 1:
            return f"parameters of types {', '.join(sorted(kinds))} would come together, which have to be of one"
    return ""
