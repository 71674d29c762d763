"""Ranks meet once. Prints when, by the clock that all processes of a machine share."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
now = time.monotonic()
assert total.item() == dist.get_world_size()
if dist.get_rank() == 0:
    print(now)
dist.destroy_process_group()
