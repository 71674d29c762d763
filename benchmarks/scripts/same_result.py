"""One epoch of a linear model, global batch 16: `same_result.py LIBRARY SAMPLES shuffled|in-order`.

Rank 0 prints the samples that were trained on, all ranks together, and the weights.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

library, samples, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
world_size = int(os.environ.get("WORLD_SIZE", "1"))
source = torch.Generator().manual_seed(1)
x = torch.randn(samples, 8, generator=source)
data = TensorDataset(x, x @ torch.randn(8, 1, generator=source))
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=max(1, 16 // world_size), shuffle=order == "shuffled")
backward = torch.Tensor.backward
is_first = os.environ.get("RANK", "0") == "0"

if library == "duoka":
    import duoka

    run = duoka.start(seed=0)
    model = run.model(model)
    loader = run.loader(data, batch_size=16, shuffle=order == "shuffled")
    is_first = run.is_first
elif library.startswith("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    split = library == "accelerate-split"
    how = DataLoaderConfiguration(use_seedable_sampler=library == "accelerate-seedable", split_batches=split)
    accelerator = Accelerator(cpu=True, dataloader_config=how)
    if split:
        loader = DataLoader(data, batch_size=16, shuffle=order == "shuffled")
    try:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    except ValueError as error:  # 16 over 3
        if is_first:
            print("refused:", error)
        sys.exit()
    backward = accelerator.backward
elif library == "fabric":
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    backward = fabric.backward
elif library == "ignite":
    import ignite.distributed as idist

    if world_size > 1:
        idist.initialize("gloo")
    model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=order == "shuffled")

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
if is_first:
    print(json.dumps([seen, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()]))
