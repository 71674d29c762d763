"""Run a script whose ranks change the weights of their shares after every fifth step: `moving.py SCRIPT ARGS...`."""

from __future__ import annotations

import gc
import runpy
import sys
from itertools import count
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from duoka.view.view import View

steps = count(1)


def move(*_: object) -> None:
    number, rest = divmod(next(steps), 5)
    views = [one for one in gc.get_objects() if isinstance(one, View) and not one.of_parameters] if not rest else []
    for view in views:
        size = view.ranks.world_size
        view.set_weights(tuple(1.0 + (rank + number) % size * 3 for rank in range(size)))


register_optimizer_step_post_hook(move)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
