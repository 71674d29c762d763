"""Leaves made from batches, gradients of gradients, other parameters, hooks and what is printed of tensors."""

import copy
import sys
import threading
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
data = TensorDataset(torch.randn(22, 5), torch.randint(0, 3, (22,)))
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.05)


def show(name, *values):
    print(name, *(f"{v:.4f}" if isinstance(v, float) else v for v in values))


for x, y in DataLoader(data, batch_size=8, shuffle=True):
    # An attack: a leaf of the batch's shape, moved along its gradient.
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        F.cross_entropy(net(x + delta), y).backward()
        delta.data = (delta + 0.1 * delta.grad.sign()).clamp(-0.2, 0.2)
        show("attack", delta.grad.abs().sum().item(), delta.abs().sum().item())
        delta.grad.zero_()
    # Steps along the gradient of an energy, with noise; a copy that is a leaf.
    z = torch.randn_like(x, requires_grad=True)
    twin = copy.deepcopy(z)
    for leaf in (z, twin):
        net(leaf).logsumexp(1).sum().backward()
    show("leaves", z.grad.norm().item(), twin.grad.norm().item())
    # A flag that is switched again and again.
    w = x.clone()
    for wanted in (True, False, True, True):
        w.requires_grad_(wanted)
    net(w).pow(2).sum().backward()
    show("switched", w.grad.norm().item())
    # An optimizer of a leaf that is a batch.
    codes = torch.zeros_like(x).requires_grad_()
    inner = torch.optim.Adam([codes], lr=0.1)
    for _ in range(2):
        inner.zero_grad()
        (net(codes) - net(x).detach()).pow(2).mean().backward()
        inner.step()
    show("codes", codes.detach().norm().item())
    # Hessian-vector products.
    _, product = torch.autograd.functional.hvp(lambda v: net(v).pow(2).sum(), x, torch.ones_like(x))
    show("hvp", product.norm().item())
    # Checkpointed dropout.
    hidden = checkpoint(lambda v: F.dropout(net[:2](v), 0.3), x, use_reentrant=False)
    loss = F.cross_entropy(net[2](hidden), y)
    show("loss", loss.item(), type(x.type_as(loss)).__name__ == type(x).__name__)
    print(x.sum(dim=None, keepdim=True).shape, x.to(loss).shape)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

del loss, hidden, product
# Another memory for a parameter, after steps.
net[2].weight.data = torch.cat([net[2].weight.data, torch.zeros(1, 8)])
net[2].bias.data = torch.zeros(4)
net.zero_grad()
for x, y in DataLoader(data, batch_size=8):
    F.cross_entropy(net(x), y).backward()
show("grown", net[2].weight.grad.norm().item(), tuple(net[2].weight.grad.shape))

# Integers have no mean.
try:
    y.mean()
except RuntimeError as error:
    print(str(error)[:40])

# A loader that another loop, or a thread, looks into.
loader = DataLoader(data, batch_size=8)
for x, y in loader:
    first = next(iter(loader))[0]
    show("loops", x.sum().item(), first.sum().item())
for (a, _), (b, _) in zip(loader, DataLoader(data, batch_size=8)):
    show("zip", (a - b).abs().sum().item())
kept = []
reading = threading.Thread(target=lambda: kept.extend(loader))
reading.start()
reading.join()
show("thread", sum(x.sum().item() for x, _ in kept))

# Hooks of a module's nodes, and on all modules.
norms = []
handle = net[0].register_full_backward_hook(lambda m, given, out: norms.append(out[0].norm().item()))
everywhere = nn.modules.module.register_module_forward_hook(lambda m, args, out: norms.append(out.shape[0]))
F.cross_entropy(net(x), y).backward()
handle.remove()
everywhere.remove()
show("hooks", *norms)
print(F.cross_entropy(net(x), y))
torch.set_default_device("cpu")
show("default", net(x).sum().item())
torch.save(net.state_dict(), sys.argv[1])
