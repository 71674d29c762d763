"""Microseconds that a step spends on telling where it is: `telling.py board | recorder | silent`.

board: on the board, as plain scripts do. recorder: by torch's flight recorder; silent: the same without it.
"""

from __future__ import annotations

import atexit
import os
import statistics
import sys
import time
from collections.abc import Callable

COLLECTIVES = 4  # in a step: gradients, loss, accuracy, and one more


def board() -> Callable[[], object]:
    import torch

    from duoka.board import Board
    from duoka.view.site import user_line

    seat = Board.create(2).seat(0)
    tensor, steps = torch.ones(3), 0

    def step() -> None:
        nonlocal steps
        for _ in range(COLLECTIVES):
            what = f"all_reduce {tuple(tensor.shape)} {str(tensor.dtype)[6:]} at {user_line()}"
            seat.enter(hash(what), what)
            seat.leave()
        steps += 1
        seat.step(steps)

    return step


def recorder() -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(3)

    def step() -> None:
        for _ in range(COLLECTIVES):
            dist.all_reduce(tensor)

    atexit.register(dist.destroy_process_group)
    return step


def measured(step: Callable[[], object]) -> float:
    times = []
    for _ in range(3000):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


os.environ["TORCH_FR_BUFFER_SIZE"] = "0" if sys.argv[1] == "silent" else "2000"
print(measured(board() if sys.argv[1] == "board" else recorder()))
