"""Runs a program whose weights are moved by one unit in the last place: what rounding alone does to it."""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

moved: dict[int, torch.Tensor] = {}
call = nn.Module.__call__


def call_moved(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for parameter in self.parameters():
        if id(parameter) not in moved:
            moved[id(parameter)] = parameter
            parameter.data.copy_(torch.nextafter(parameter.data, torch.tensor(torch.inf).to(parameter)))
    return call(self, *args, **kwargs)


nn.Module.__call__ = call_moved  # type: ignore[method-assign]
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
