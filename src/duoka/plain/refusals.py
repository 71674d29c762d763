"""Calls that are not allowed in a plain script: they raise an error with the script's line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from duoka.errors import Refused
from duoka.hardware import accelerator
from duoka.plain.session import Session
from duoka.system.user_code import user_line
from duoka.view.tensor.batch import BatchTensor


def install(session: Session) -> None:
    """Refuse process groups (for which there is --kind distributed), edges of batches, and graphs of kernels."""

    @session.patches.around(dist, "init_process_group")
    def refuse_group(original: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise Refused(
            f"{user_line()} calls torch.distributed.init_process_group, but was taken for a script written for "
            "one device; run it with --kind distributed"
        )

    @session.patches.around(torch.autograd.graph, "get_gradient_edge")
    def get_gradient_edge(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        if isinstance(tensor, BatchTensor):
            raise Refused(
                f"{user_line()} calls get_gradient_edge of a batch, of which each rank has a node for its rows; ask "
                "for the gradient of the batch itself: torch.autograd.grad(loss, batch)"
            )
        return original(tensor)

    for space in filter(None, (accelerator.module(), torch.accelerator)):
        names = [name for name in vars(space) if name.lower().endswith("graph") or name == "make_graphed_callables"]
        for name in names:
            session.patches.around(space, name)(partial(_refuse_graph, f"{space.__name__}.{name}"))


def _refuse_graph(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):  # of torch.compile, on local rows
        return original(*args, **kwargs)
    raise Refused(
        f"{user_line()} calls {name}: a graph repeats kernels without Python, so duoka cannot "
        "share its batches out; leave the graph out, or run the script on one GPU"
    )
