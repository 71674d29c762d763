"""A training loop that goes on where it was: `resumed.py WEIGHTS PAUSE [KILLED_AT]`, in seconds and steps."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import duoka

weights, pause, killed_at = sys.argv[1], float(sys.argv[2]), int((*sys.argv, "-1")[3])
source = torch.Generator().manual_seed(7)
x, y = torch.randn(53, 8, generator=source), torch.randint(0, 4, (53,), generator=source)

run = duoka.start(seed=0)
hidden = nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3)
model = run.model(nn.Sequential(*hidden, nn.Linear(32, 4)))
train = run.loader((x, y), batch_size=10, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
saved = run.checkpoint("out", model=model, optimizer=optimizer, scheduler=scheduler, loader=train, every_steps=1)
for epoch in saved.epochs(3):
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.print(f"{epoch} {saved.step_number} {len(inputs)} {loss.item():.5f} {torch.rand(()):.6f}", flush=True)
        if saved.step_number == killed_at and run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
if run.is_first:
    torch.save(model.state_dict(), weights)
