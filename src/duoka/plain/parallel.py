"""nn.DataParallel in a plain script: calls its module directly.

duoka shares batches out itself; the class's name, `.module` and the `module.` in its state dict stay, and inputs
are moved to the GPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from duoka.hardware import accelerator
from duoka.plain.session import Session
from duoka.private.torch import tree_map_only


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """A `nn.DataParallel` that calls its module."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        nn.Module.__init__(self)
        self._device = accelerator.best()
        self.device_ids = [0] if self._device.type != "cpu" else []
        self.module, self.dim = module.to(self._device) if self.device_ids else module, dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.device_ids:
            inputs, kwargs = tree_map_only(Tensor, lambda one: one.to(self._device), (inputs, kwargs))
        return self.module(*inputs, **kwargs)


def install(session: Session) -> None:
    """Replace `nn.DataParallel`."""
    for space in (nn, nn.parallel):
        session.patches.put(space, "DataParallel", DataParallel)
