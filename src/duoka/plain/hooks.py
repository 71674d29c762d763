"""Hooks on parameters: they see the whole batch's gradient, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.view.parts import is_scripts_own
from duoka.view.site import user_line


def install(session: Session) -> None:
    """Intercept `Tensor.register_hook` and refuse `register_post_accumulate_grad_hook`."""

    def make_register(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            if not self.is_leaf:
                inside = session.boundary.inside if is_scripts_own(hook) else None
                if inside is not None and inside.cut is not None:
                    raise Refused(
                        f"{user_line()} registers a hook on a tensor inside of a model, which would see this rank's "
                        "part of a gradient only; run this script on one device"
                    )
                return original(self, hook)

            return session.strategy.register_hook(self, hook, original)

        return register_hook

    def make_refuse(original: Callable[..., Any]) -> Callable[..., NoReturn]:
        def register_post_accumulate_grad_hook(self: Tensor, hook: Callable[[Tensor], None]) -> NoReturn:
            raise Refused(
                f"{user_line()} registers a post-accumulate-grad hook, which would see this rank's part of a "
                "gradient only; do what it does after backward() instead"
            )

        return register_post_accumulate_grad_hook

    session.patches.replace(Tensor, "register_hook", make_register)
    session.patches.replace(Tensor, "register_post_accumulate_grad_hook", make_refuse)
