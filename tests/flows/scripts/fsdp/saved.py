"""A network with BatchNorm, saved in every way, put back, made of another type, pruned; then a new optimizer."""

import copy
import io
import pickle
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3)


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )


def sums(state):
    return {name: f"{value.float().sum().item():.4f}" for name, value in state.items()}


model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x, y = torch.randn(33, 1, 8, 8), torch.randint(0, 10, (33,))


def train():
    for start in range(0, 33, 11):
        loss = F.cross_entropy(model(x[start : start + 11]), y[start : start + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.5f}")


train()
folder = Path(tempfile.mkdtemp())
torch.save({"model": model, "optimizer": optimizer.state_dict()}, folder / "all.pt")
loaded = torch.load(folder / "all.pt", weights_only=False)
print(type(loaded["model"][0].weight), sums(loaded["model"].state_dict()))
print({name: tuple(value.shape) for name, value in loaded["optimizer"]["state"][0].items()})
save_file(model.state_dict(), folder / "state.safetensors")
save_model(model, folder / "model.safetensors")
print(sums(load_file(folder / "state.safetensors")), sums(load_file(folder / "model.safetensors")))
buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
print(sums(torch.load(buffer)), sums(pickle.loads(pickle.dumps(model.state_dict()))))

best = {name: value.clone() for name, value in model.state_dict().items()}
deep = copy.deepcopy(model.state_dict())
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
print(sums(model.state_dict()))
model.load_state_dict(best)
print(sums(model.state_dict()), sums(deep))
model.double()
print(model[4].weight.nbytes, model[4].weight.element_size(), model[4].weight.type())
print(f"{F.cross_entropy(model(x.double()), y).item():.5f}", model[4].weight.dtype)
model.float()
with torch.no_grad():
    weight = model[4].weight
    print([f"{value:.3f}" for value in torch.linalg.svdvals(weight)[:3].tolist()])
    weight.mul_((weight.abs() > weight.abs().median()).float())
    print(f"{weight.norm():.4f}", int((weight == 0).sum()))
train()

model, state = net(), optimizer.state_dict()
model.load_state_dict(loaded["model"].state_dict())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer.load_state_dict(loaded["optimizer"])
train()
torch.save([model.state_dict(), best, optimizer.state_dict()["state"]], sys.argv[1])
