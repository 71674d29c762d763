"""Parts of a model called by themselves, parameters used as tensors, functional calls, gradients of gradients."""

import sys

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

torch.manual_seed(3)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mixing = nn.Linear(6, 9), nn.Parameter(torch.randn(9, 9) * 0.1)

    def forward(self, x):
        return torch.tanh(self.linear(x) @ self.mixing + F.linear(x, self.mixing[:, :6]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoders = nn.ModuleDict({"one": nn.Linear(9, 6), "other": nn.Linear(9, 6)})
        self.recurrent = nn.LSTM(6, 9, batch_first=True)

    def decode(self, codes, kind):
        return checkpoint(self.decoders[kind], codes, use_reentrant=False)


model = Model()
samples = torch.randn(31, 6)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for _ in range(2):
    for start in range(0, 31, 6):  # the last batch is smaller than there are workers
        x = samples[start : start + 6]
        codes = model.encoder(x)
        loss = F.mse_loss(model.decode(codes, "one"), x)
        loss = loss + F.l1_loss(model.decode(codes.detach(), "other"), x, reduction="sum") / 10
        loss = loss + model.recurrent(x.view(-1, 1, 6))[0].pow(2).mean()
        loss = loss + 1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.5f} {model.encoder(samples[0]).sum().item():.5f}")
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.01 * parameter.grad
    total = 0
    for x in DataLoader(samples, batch_size=10):
        total += F.mse_loss(model.decode(model.encoder(x), "one"), x, reduction="sum").item()
    print(f"{total:.4f}")

parameters = dict(model.encoder.named_parameters())
print(f"{functional_call(model.encoder, parameters, (samples,)).sum().item():.5f}")
values = {name: parameter.detach() for name, parameter in parameters.items()}
found = torch.func.grad(lambda given: functional_call(model.encoder, given, (samples,)).pow(2).mean())(values)
print([f"{value.norm():.5f}" for value in found.values()])

# Steps that are differentiated through.
fast = dict(parameters)
for _ in range(2):
    inner = functional_call(model.encoder, fast, (samples,)).pow(2).mean()
    steps = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
    fast = {name: value - 0.1 * step for (name, value), step in zip(fast.items(), steps, strict=True)}
outer = functional_call(model.encoder, fast, (samples,)).pow(2).mean()
model.zero_grad()
outer.backward()
print(f"{outer.item():.5f}", [f"{parameter.grad.norm():.5f}" for parameter in model.encoder.parameters()])

# A hook sees, and changes, the whole gradient; one freezes and thaws.
seen = []
handle = model.encoder.mixing.register_hook(lambda grad: (seen.append(grad.norm().item()), grad * 2)[1])
model.encoder.linear.requires_grad_(False)
model.zero_grad()
model.encoder(samples).sum().backward()
handle.remove()
print(f"{seen[0]:.4f} {model.encoder.mixing.grad.norm():.4f}", model.encoder.linear.weight.grad)
model.encoder.linear.requires_grad_(True)
torch.save(model.state_dict(), sys.argv[1])
