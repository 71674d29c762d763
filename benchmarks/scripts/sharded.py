"""A transformer of 20 or 200 million parameters with AdamW, in parts on several ranks.

    sharded.py step|memory|live [large] [by_hand]

It says milliseconds for a step, or MB: `memory`, that rank 0 grew by; `live`, of tensors at the peak, by torch's
allocator. by_hand: with torch's `fully_shard`.
"""

import os
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

BY_HAND, LIVE = "by_hand" in sys.argv, "live" in sys.argv
if BY_HAND:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.manual_seed(0)
WIDTH, WORDS, LAYERS, HEADS = (1024, 24000, 12, 16) if "large" in sys.argv else (384, 8000, 8, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def changes(events):
    """Yield time, address and bytes of each allocation, and minus the bytes of what is freed."""
    for event in events:
        if str(event.tag).endswith("Allocation"):
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from changes(event.children)


def peak(events):
    """Most bytes that were alive at once. What gloo's threads free is seen when its address is given out again."""
    alive, total, most = {}, 0, 0
    for _, address, size in sorted(changes(events), key=lambda change: change[0]):
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total, most = total + size, max(most, total + size)
    return most


profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
if LIVE:
    profile.start()
model = Net()
ids = torch.randint(0, WORDS, (4 if "large" in sys.argv else 16, 65))
if BY_HAND:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    ids = ids[rank * len(ids) // size : (rank + 1) * len(ids) // size]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
times = []
for _ in range(6 if "step" in sys.argv else 3):
    start = time.perf_counter()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    reported = loss.detach()
    if BY_HAND:
        dist.all_reduce(reported)
    reported.item()
    times.append(time.perf_counter() - start)
told = 1e3 * sorted(times[2:])[len(times[2:]) // 2] if not LIVE else 0.0
if "memory" in sys.argv:
    told = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
if LIVE:
    profile.stop()
    told = peak(profile.profiler.kineto_results.experimental_event_tree()) / 2**20
if not BY_HAND or rank == 0:
    print(told)
if BY_HAND:
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo aborts now and then while it is taken down
