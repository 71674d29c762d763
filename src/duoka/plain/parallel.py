"""nn.DataParallel in a plain script: calls its module directly.

duoka shares batches out itself; the class's name, `.module` and the `module.` in its state dict stay.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from duoka.plain.session import Session


class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """A `nn.DataParallel` that calls its module."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.device_ids: list[Any] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)


def install(session: Session) -> None:
    """Replace `nn.DataParallel`."""
    for space in (nn, nn.parallel):
        session.patches.put(space, "DataParallel", DataParallel)
