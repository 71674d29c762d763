"""Epochs of a linear model, global batch 16: `same_result.py LIBRARY SAMPLES,ORDER...` (103,shuffled 96,in-order).

For each, rank 0 prints the samples that were trained on, all ranks together, and the weights; null: it was refused.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIBRARY, CASES = sys.argv[1], [case.split(",") for case in sys.argv[2:]]
WORLD_SIZE, IS_FIRST = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"


def by_duoka(model, optimizer, loader, how):
    model = run.model(model)
    return model, optimizer, run.loader(loader.dataset, batch_size=16, shuffle=how == "shuffled")


def by_accelerate(model, optimizer, loader, how):
    if accelerator.split_batches:
        loader = DataLoader(loader.dataset, batch_size=16, shuffle=how == "shuffled")
    return accelerator.prepare(model, optimizer, loader)


def by_fabric(model, optimizer, loader, how):
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, fabric.setup_dataloaders(loader)


def by_ignite(model, optimizer, loader, how):
    loader = idist.auto_dataloader(loader.dataset, batch_size=16, shuffle=how == "shuffled")
    return idist.auto_model(model), idist.auto_optim(optimizer), loader


backward = torch.Tensor.backward
if LIBRARY == "duoka":
    import duoka

    run = duoka.start(seed=0)
    prepare, WORLD_SIZE, IS_FIRST = by_duoka, run.world_size, run.is_first
elif LIBRARY.startswith("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    words = {"use_seedable_sampler": LIBRARY.endswith("seedable"), "split_batches": LIBRARY.endswith("split")}
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**words))
    prepare, backward = by_accelerate, accelerator.backward
elif LIBRARY == "fabric":
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE)
    fabric.launch()
    prepare, backward = by_fabric, fabric.backward
else:
    import ignite.distributed as idist

    if WORLD_SIZE > 1:
        idist.initialize("gloo")
    prepare = by_ignite

for samples, how in CASES:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(int(samples), 8, generator=source)
    data = TensorDataset(x, x @ torch.randn(8, 1, generator=source))
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=max(1, 16 // WORLD_SIZE), shuffle=how == "shuffled")
    try:
        model, optimizer, loader = prepare(model, optimizer, loader, how)
        seen = 0
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            seen += len(inputs)
    except ValueError:  # Accelerate's split_batches: 16 over 3
        if IS_FIRST:
            print("[null, []]", flush=True)
        continue
    if LIBRARY != "duoka" and WORLD_SIZE > 1:
        total = torch.tensor(seen)
        torch.distributed.all_reduce(total)
        seen = int(total)
    if IS_FIRST:
        print(json.dumps([seen, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()]), flush=True)
