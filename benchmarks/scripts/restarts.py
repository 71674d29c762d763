"""The last rank kills itself once: prints when it does, and when the ranks have met again; clock as all_reduce.py."""

import os
import signal
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
begun_again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for step in range(3):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    if step == 0 and begun_again and rank == 0:
        os.write(1, b"met %.6f\n" % time.monotonic())
if not begun_again:
    if rank == size - 1:
        os.write(1, b"killed %.6f\n" % time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
