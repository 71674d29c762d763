"""The same for a script that does its own torch.distributed: `ranked.py STEPS - [fault@rank:step]`."""

import sys

import injector
import torch
import torch.distributed as dist

STEPS = int(sys.argv[1])

injector.strike(-1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(STEPS):
    if injector.is_due(step, "break"):
        break
    if injector.is_due(step, "order"):
        dist.broadcast(torch.ones(3), 0)
    injector.strike(step)
    loss = model(torch.ones(4, 2)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    print("done")
