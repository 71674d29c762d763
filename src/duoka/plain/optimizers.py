"""Optimizers: their parameters are kept in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from duoka.plain.session import Session
from duoka.view.tensor.batch import BatchTensor


def install(session: Session) -> None:
    """Intercept `Optimizer.add_param_group`, which is called for all parameters."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
            original(self, param_group)
            for parameter in self.param_groups[-1]["params"]:
                if not isinstance(parameter, BatchTensor):  # a batch's gradient belongs to its own rows
                    session.strategy.adopt(parameter)

        return add_param_group

    session.patches.replace(Optimizer, "add_param_group", make)
