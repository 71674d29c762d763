"""Microseconds that a step of 1 ms spends on telling where it is: `telling.py board | recorder | silent | watcher`.

board: on the board, as plain scripts do. recorder: by torch's flight recorder, and a thread that looks at it; silent:
the same without them. watcher: what the process outside spends on looking at the board meanwhile.
"""

from __future__ import annotations

import atexit
import os
import statistics
import sys
import time
from collections.abc import Callable

COLLECTIVES = 4  # in a step: gradients, loss, accuracy, and one more
STEPS_BETWEEN_LOOKS = 500  # of 1 ms, in half a second


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


def look() -> Callable[[], object]:
    """What the thread does twice a second."""
    from duoka.board import Board
    from duoka.recorder import show_on

    return show_on(Board.create(2).seat(0)).look


def watcher() -> Callable[[], object]:
    """What the process that watches two workers does twice a second: both are in a collective, and work."""
    import socket

    from duoka.board import Board
    from duoka.launchers.crew import Worker
    from duoka.launchers.stuck import Idleness, Limits, find_stuck, waits_in_vain

    board, limits, idleness = Board.create(2), Limits(600.0), Idleness()
    workers = [Worker(rank, os.getpid(), socket.socket(), 0, own_log=False) for rank in range(2)]
    for rank in range(2):
        seat = board.seat(rank)
        for number in range(100):
            seat.enter(number, "all_reduce (3,) float32 at train.py:41")
            if number < 99:
                seat.leave()

    def watch() -> None:
        assert find_stuck(board, workers, limits, idleness) is None
        assert not waits_in_vain(board, workers)

    return watch


def measured(step: Callable[[], object]) -> float:
    times = []
    for _ in range(3000):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


def told(how: str) -> float:
    if how == "board":
        return measured(board())
    if how == "watcher":
        return measured(watcher()) / STEPS_BETWEEN_LOOKS
    spent = measured(recorder())
    return spent if how == "silent" else spent + measured(look()) / STEPS_BETWEEN_LOOKS


os.environ["TORCH_FR_BUFFER_SIZE"] = "0" if sys.argv[1] == "silent" else "256"
print(told(sys.argv[1]))
