"""A loop over Accelerate's objects: accumulation, clipping, a schedule, metrics, state saved and loaded."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(103, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, train, held_out, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, 16, shuffle=True), DataLoader(data, 20), schedule
)
for epoch in range(3):
    model.train()
    total = 0.0
    for rows, labels in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.item()
    model.eval()
    guesses, truth = [], []
    for rows, labels in held_out:
        with torch.no_grad():
            found = accelerator.gather_for_metrics((model(rows).argmax(1), labels))
        guesses.append(found[0])
        truth.append(found[1])
    right = (torch.cat(guesses) == torch.cat(truth)).float().mean().item()
    accelerator.print(epoch, f"{total:.6f} {right:.4f}", len(torch.cat(guesses)), schedule.get_last_lr())
accelerator.wait_for_everyone()
accelerator.save_state("state")
accelerator.load_state("state")
torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
print(accelerator.num_processes)
