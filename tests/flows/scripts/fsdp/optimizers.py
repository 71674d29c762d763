"""Optimizers that take all parameters in one call, that multiply matrices, that look at rows and columns, by hand."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, rate):
        super().__init__(parameters, {"rate": rate})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                way = state["mean"].clone().mul_(0.9).add_(parameter.grad, alpha=0.1).sign_()
                parameter.data.mul_(1 - group["rate"] * parameter.norm() / 10).add_(way, alpha=-group["rate"])
                state["mean"].lerp_(parameter.grad, 0.01)


OPTIMIZERS = {
    "fused": lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True, amsgrad=True),
    "foreach": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "muon": lambda given: torch.optim.Muon([one for one in given if one.dim() == 2], lr=1e-2),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=1e-2),
    "by hand": lambda given: Lion(given, 1e-2),
}
torch.manual_seed(0)
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
saved = []
for name, make in OPTIMIZERS.items():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(list(model.parameters()))
    for _ in range(3):
        for start in range(0, 40, 10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[start : start + 10]), y[start : start + 10])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=name == "foreach" or None)
            optimizer.step()
    print(f"{name} {loss.item():.5f} {norm.item():.5f}")
    saved += [model.state_dict()]
torch.save(saved, sys.argv[1])
