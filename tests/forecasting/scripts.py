"""Scripts for forecasts.

Sleeping stands for computing, since its time does not depend on the load. A script sleeps for the rows of its rank,
as a kernel would; for the script the batch has all rows.
"""

MODEL = """
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(2400, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, rows):
        own = rows.to_local() if hasattr(rows, "to_local") else rows
        time.sleep(PER_ROW * own.shape[0])
        return self.layer(rows)


PER_ROW, PER_STEP = 0, 0
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

LOOP = """
for (rows,) in DataLoader(TensorDataset(x), batch_size=24):
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(PER_STEP)
    print("loss", loss.item())
    torch.save(model.state_dict(), "model.pt")
"""

QUICK = MODEL + LOOP
SHARED_OUT = QUICK.replace("PER_ROW, PER_STEP = 0, 0", "PER_ROW, PER_STEP = 0.008, 0")
CONSTANT = QUICK.replace("PER_ROW, PER_STEP = 0, 0", "PER_ROW, PER_STEP = 0, 0.03")

NO_LOADER = MODEL + LOOP.replace("DataLoader(TensorDataset(x), batch_size=24)", "[(x[:24],)] * 100")
SMALL_BATCH = QUICK.replace("batch_size=24", "batch_size=2")
SHORT = QUICK.replace("torch.randn(2400, 4)", "torch.randn(24 * 6, 4)")
SHORT_ENOUGH = QUICK.replace("torch.randn(2400, 4)", "torch.randn(24 * 8, 4)")
NO_STEPS = QUICK.replace("    optimizer.step()\n", "")
FAILS = QUICK.replace("    time.sleep(PER_STEP)\n", "    assert loss.item() < 0, 'too large'\n")
FAILS_ON_TWO = QUICK.replace("    time.sleep(PER_STEP)\n", "    assert torch.get_num_threads() > 1, 'too few'\n")
KILLED = QUICK.replace("    time.sleep(PER_STEP)\n", "    import os; os.kill(os.getpid(), 9)\n")

# What no rule knows: all ranks compute all of it.
WHOLE = (
    MODEL
    + """

def slow(found):
    return torch.sort(found.repeat(1, 3000), dim=0).values

"""
    + LOOP.replace("model(rows).square()", "slow(model(rows)).square()")
)

TWO_OPTIMIZERS = """
import torch
from torch import nn

torch.manual_seed(1)
G, D = nn.Linear(3, 2), nn.Linear(2, 1)
for_g, for_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for step in range(9):
    for_d.zero_grad()
    D(G(torch.randn(30, 3)).detach()).mean().backward()
    for_d.step()
    for_g.zero_grad()
    D(G(torch.randn(30, 3))).mean().backward()
    for_g.step()
"""

API = """
import duoka
import torch
from torch import nn

run = duoka.start()
model = run.model(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
saved = run.checkpoint("out", model=model, optimizer=optimizer)
for epoch in saved.epochs(20):
    for (rows,) in run.loader((torch.randn(96, 4),), batch_size=24):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

OWN_RANKS = """
import torch.distributed as dist

dist.init_process_group("gloo")
"""

EITHER_WITHOUT_LOADER = (
    """
import os

if "RANK" in os.environ:
    import torch.distributed as dist

    dist.init_process_group("gloo")
"""
    + NO_LOADER
)
