"""Hooks on tensors that every rank holds whole: they receive the whole batch's gradient, as on one device.

In a backward pass each rank has its own part of such a tensor's gradient, whose mean over ranks is the whole one
(view/shares/differentiable.py); the mean is taken before a hook is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.system.user_code import user_line
from duoka.view.support.kinds import is_scripts_own
from duoka.view.tensor.batch import BatchTensor


def install(session: Session) -> None:
    """Intercept `Tensor.register_hook` and `retain_grad`, and refuse `register_post_accumulate_grad_hook`."""

    def make_register(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            of_shares = isinstance(self, BatchTensor) and self._spec.view.shares.several and self.requires_grad
            if (self.is_leaf and of_shares) or (
                not isinstance(self, BatchTensor) and (self.is_leaf or is_scripts_own(hook))
            ):
                return session.strategy.register_hook(self, hook)
            return original(self, hook)

        return register_hook

    def make_retain(original: Callable[..., Any]) -> Callable[..., Any]:
        def retain_grad(self: Tensor) -> None:
            plain = not isinstance(self, BatchTensor)
            if plain and self.requires_grad and not self.is_leaf and not self.retains_grad:
                session.strategy.register_hook(self, lambda _: None)
            original(self)

        return retain_grad

    def make_refuse(original: Callable[..., Any]) -> Callable[..., NoReturn]:
        def register_post_accumulate_grad_hook(self: Tensor, hook: Callable[[Tensor], None]) -> NoReturn:
            raise Refused(
                f"{user_line()} registers a post-accumulate-grad hook, which would see this rank's part of a "
                "gradient only; do what it does after backward() instead"
            )

        return register_post_accumulate_grad_hook

    session.patches.replace(Tensor, "register_hook", make_register)
    session.patches.replace(Tensor, "retain_grad", make_retain)
    session.patches.replace(Tensor, "register_post_accumulate_grad_hook", make_refuse)
