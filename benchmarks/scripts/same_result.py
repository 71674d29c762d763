"""One epoch of a linear model with a global batch of 16, as a library has it: `same_result.py LIBRARY CASE ...`.

Rank 0 prints for each case (`103`, `103s`: shuffled) how many samples were trained on, all ranks together, and the
weights, or null where the library refuses the batch: a JSON line.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

library, *cases = sys.argv[1:]
world_size = int(os.environ.get("WORLD_SIZE", "1"))
is_first = os.environ.get("RANK", "0") == "0"


def train(samples: int, shuffle: bool) -> tuple[int, list[float]] | None:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 8, generator=source)
    data = TensorDataset(x, x @ torch.randn(8, 1, generator=source))
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if library == "duoka":
        model = run.model(model)
        loader = run.loader(data, batch_size=16, shuffle=shuffle)
    elif library == "ignite":
        model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)
        loader = idist.auto_dataloader(data, batch_size=16, shuffle=shuffle)
    else:
        share = 16 if library == "accelerate-split" else max(1, 16 // world_size)
        loader = DataLoader(data, batch_size=share, shuffle=shuffle)
        if library.startswith("accelerate"):
            try:
                model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            except ValueError:  # 16 over 3
                return None
        else:
            model, optimizer = fabric.setup(model, optimizer)
            loader = fabric.setup_dataloaders(loader)

    seen = 0
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        seen += len(inputs)
    if library != "duoka" and world_size > 1:
        total = torch.tensor(seen)
        torch.distributed.all_reduce(total)
        seen = int(total)
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


backward = torch.Tensor.backward
if library == "duoka":
    import duoka

    run = duoka.start(seed=0)
    is_first = run.is_first
elif library.startswith("accelerate"):
    from accelerate import Accelerator, DataLoaderConfiguration

    how = DataLoaderConfiguration(
        use_seedable_sampler=library == "accelerate-seedable", split_batches=library == "accelerate-split"
    )
    accelerator = Accelerator(cpu=True, dataloader_config=how)
    backward = accelerator.backward
elif library == "fabric":
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size)
    fabric.launch()
    backward = fabric.backward
elif library == "ignite":
    import ignite.distributed as idist

    if world_size > 1:
        idist.initialize("gloo")
for case in cases:
    found = train(int(case.rstrip("s")), shuffle=case.endswith("s"))
    if is_first:
        print(json.dumps(found), flush=True)
os._exit(0)  # taking python down after gloo ends in an abort now and then (torch 2.13)
