"""A plain script that trains, with places for faults: `plain.py STEPS LOADER_WORKERS [fault@rank:step]`."""

import os
import signal
import sys

import injector
import torch

STEPS, LOADER_WORKERS = int(sys.argv[1]), int(sys.argv[2])


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 6 * STEPS

    def __getitem__(self, index):
        step = index // 6
        in_worker = torch.utils.data.get_worker_info() is not None
        if in_worker:
            self.fail_in_worker(step)
        elif injector.is_due(step, "loader"):
            raise OSError("injected in loader")
        return torch.tensor([index / 10, 1.0]), torch.tensor([index / 5])

    def fail_in_worker(self, step):
        fault = injector.asked()
        if fault is None or fault.step != step or fault.rank != RANK:
            return
        if fault.name == "worker-raises":
            injector.write_truth(fault)
            raise OSError("injected in worker")
        if fault.name == "worker-dies":
            injector.write_truth(fault)
            os.kill(os.getpid(), signal.SIGKILL)


RANK = injector.rank()  # a loader's worker has another parent
injector.strike(-1)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
how = {"multiprocessing_context": "fork"} if LOADER_WORKERS else {}  # RANK is theirs, too
loader = torch.utils.data.DataLoader(Data(), batch_size=6, num_workers=LOADER_WORKERS, **how)
for step, (x, y) in enumerate(loader):
    if injector.is_due(step, "break"):
        break
    if injector.is_due(step, "order"):
        print(model(x).sum().item())
    injector.strike(step)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
