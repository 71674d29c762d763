"""Calls that are not allowed in a plain script: they raise an error with the script's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.view.support.user_code import user_line


def install(session: Session) -> None:
    """Refuse to create a process group: scripts that do are run with --kind distributed."""

    def make(original: Callable[..., Any]) -> Callable[..., NoReturn]:
        def init_process_group(*args: Any, **kwargs: Any) -> NoReturn:
            raise Refused(
                f"{user_line()} calls torch.distributed.init_process_group, but was taken for a script written for "
                "one device; run it with --kind distributed"
            )

        return init_process_group

    session.patches.replace(dist, "init_process_group", make)
