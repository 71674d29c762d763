"""What models hold of the memory of this rank's device."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from duoka.hardware import accelerator
from duoka.view.tensor.batch import BatchTensor


def model_bytes(optimizers: Iterable[Optimizer]) -> tuple[int, int, int]:
    """Return the bytes of optimizers' parameters, their gradients, and the optimizers' states."""
    optimizers = list(optimizers)
    parameters = [value for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    entries = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    states = [value for value in entries if isinstance(value, Tensor)]
    return _bytes(parameters), _bytes(gradients), _bytes(states)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors on the accelerator, if there is one in use."""
    kind = accelerator.kind() if accelerator.in_use() else "cpu"
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    local = (tensor.to_local() if isinstance(tensor, BatchTensor) else tensor for tensor in distinct)
    return sum(tensor.nbytes for tensor in local if tensor.device.type == kind)


def memory_held() -> tuple[int, int, int, int]:
    """Return the bytes of parameters, gradients, optimizers' states, and of all tensors; of these 0 on a CPU."""
    optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    module = accelerator.in_use()
    return *model_bytes(optimizers), module.memory_allocated() if module else 0
