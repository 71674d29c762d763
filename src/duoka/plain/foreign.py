"""What a plain script cannot do: say so, with the line, instead of running it wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.view.site import user_line


def install(session: Session) -> None:
    """Refuse a process group of the script's own: such a script is of the other kind."""

    def make(original: Callable[..., Any]) -> Callable[..., NoReturn]:
        def init_process_group(*args: Any, **kwargs: Any) -> NoReturn:
            raise Refused(
                f"{user_line()} calls torch.distributed.init_process_group, but was taken for a script written for "
                "one device; run it with --kind distributed"
            )

        return init_process_group

    session.patches.replace(dist, "init_process_group", make)
