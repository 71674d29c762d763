"""Print the microseconds that a step of 1 ms spends on its status: `telling.py board | recorder | silent | watcher`.

board: on the status board, as in plain scripts. recorder: by torch's flight recorder and the thread that reads it;
silent: the same without them. watcher: what the command process spends on reading the board meanwhile.
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

    from duoka.supervision.status_board import StatusBoard
    from duoka.system.user_code import user_line

    slot = StatusBoard.create(2).slot(0)
    tensor, steps = torch.ones(3), 0

    def step() -> None:
        nonlocal steps
        for _ in range(COLLECTIVES):
            what = f"all_reduce {tuple(tensor.shape)} {str(tensor.dtype)[6:]} at {user_line()}"
            slot.begin_collective(hash(what), what)
            slot.end_collective()
        steps += 1
        slot.step(steps)

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
    """Return the function that the thread calls twice a second."""
    from duoka.supervision.flight_recorder import follow_recorder
    from duoka.supervision.status_board import StatusBoard

    return follow_recorder(StatusBoard.create(2).slot(0)).look


def watcher() -> Callable[[], object]:
    """Return what the command process calls twice a second: both workers are in a collective, and work."""
    import socket

    from duoka.launchers.hangs import IdleClock, Limits, find_stuck, waiting_for_ended
    from duoka.launchers.workers import Worker
    from duoka.supervision.status_board import StatusBoard

    board, limits, idle_clock = StatusBoard.create(2), Limits(600.0), IdleClock()
    workers = [Worker(rank, os.getpid(), socket.socket(), 0, own_log=False) for rank in range(2)]
    for rank in range(2):
        slot = board.slot(rank)
        for number in range(100):
            slot.begin_collective(number, "all_reduce (3,) float32 at train.py:41")
            if number < 99:
                slot.end_collective()

    def watch() -> None:
        assert find_stuck(board, workers, limits, idle_clock) is None
        assert not waiting_for_ended(board, workers)

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
