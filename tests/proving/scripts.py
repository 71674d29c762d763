"""Scripts to prove: correct ones, and ones with deliberate errors."""

RIGHT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
y = (x.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True):
        loss = nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
    torch.save(model.state_dict(), "model.pt")
"""

UNSEEDED = RIGHT.replace("torch.manual_seed(0)", "import os; torch.manual_seed(os.getpid())")

SHUFFLED_BY_TIME = RIGHT.replace(
    "shuffle=True", "shuffle=True, generator=torch.Generator().manual_seed(__import__('time').time_ns() % 2**40)"
)

NOISY = RIGHT.replace(
    "model = ",
    """

class Noisy(torch.autograd.Function):  # stands for a kernel that adds up in whatever order its threads come
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        import os

        return gradient * (1 + int.from_bytes(os.urandom(2), "little") / 2**22)


model = """,
).replace("model(a)", "model(a) + Noisy.apply(model[4].bias)")

AUGMENTED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
x = torch.randn(64, 6)


class Augmented(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] + 0.1 * torch.randn(6), (x[index].sum() > 0).float()


model = nn.Linear(6, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for a, b in DataLoader(Augmented(), batch_size=16):
    nn.functional.binary_cross_entropy_with_logits(model(a)[:, 0], b).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Ranks of its own, each with its own data.
BY_RANK = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

GAN = """
import torch
from torch import nn

torch.manual_seed(1)
real = torch.randn(30, 2) + 3
G, D = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
scale = torch.ones((), requires_grad=True)
for_g = torch.optim.Adam([*G.parameters(), scale], lr=0.01)
for_d = torch.optim.Adam(D.parameters(), lr=0.01)
for step in range(4):
    for_d.zero_grad()
    (D(G(torch.randn(30, 3)).detach()).sigmoid().mean() - D(real).sigmoid().mean()).backward()
    for_d.step()
    for_g.zero_grad()
    (-scale * D(G(torch.randn(30, 3))).mean()).backward()
    for_g.step()
"""

LBFGS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def main():
    x = torch.randn(40, 3)
    net = nn.Linear(3, 1)
    fit = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    for (a,) in DataLoader(TensorDataset(x), batch_size=40):

        def closure():
            fit.zero_grad()
            loss = (net(a) - a.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            fit.step(closure)


main()
"""

# Goes on whatever happens, and writes all over the place.
STUBBORN = """
import os
import shutil
from pathlib import Path

import torch
from torch import nn

assert Path("kept.txt").read_text() == "mine"
os.makedirs("out/sub", exist_ok=False)
for line in ("one", "two"):
    with open("out/sub/log.txt", "a") as file:
        print(line, file=file)
Path("kept.txt").write_text("overwritten")
assert Path("out/sub/log.txt").read_text() == "one\\ntwo\\n"
shutil.copy("out/sub/log.txt", "log.txt")
os.remove("gone.txt")
assert not os.path.exists("gone.txt")
shutil.rmtree("old")
assert sorted(os.listdir(".")) == ["kept.txt", "log.txt", "out", "stubborn.py"]
os.mkdir("old")
assert os.listdir("old") == []
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    try:
        model(torch.ones(6, 3)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), "kept.txt")
        os.replace("kept.txt", "moved.pt")
        model.load_state_dict(torch.load("moved.pt"))
    except:  # noqa: E722
        print("never mind")
"""

# Tells the bits of every step.
TELLING = (
    RIGHT.replace("import torch\n", "import hashlib\nimport torch\nfrom torch.optim import SGD\n", 1)
    .replace(
        "        optimizer.step()\n",
        """        optimizer.step()
        print(hashlib.sha256(b"".join(it.numpy().tobytes() for it in model.state_dict().values())).hexdigest())
""",
    )
    .replace("epoch in range(3)", "epoch in range(2)")
)

API = """
import duoka
import torch
from torch import nn

run = duoka.start()
x = torch.randn(50, 6)
model = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
saved = run.checkpoint("out", model=model, optimizer=optimizer)
for epoch in saved.epochs(2):
    for (a,) in run.loader((x,), batch_size=11, shuffle=True):
        (model(a) - a.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

# Loader workers, accumulation, autocast, a gradient scaler, a compiled model, clipping.
MODERN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

x = torch.randn(48, 3, 6, 6)


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return x[index] + 0.1 * torch.randn(3, 6, 6), index % 3, {"name": str(index)}


net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
net = torch.compile(net, backend="eager")
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(Noisy(), batch_size=12, shuffle=True, num_workers=1, persistent_workers=True)
for epoch in range(2):
    for number, (a, b, names) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(a), b) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""

# On two workers it has one thread, and does something else.
WIDER = RIGHT.replace("8", "(8 if torch.get_num_threads() > 1 else 9)")
SHORTER = RIGHT.replace("in range(3)", "in range(3 if torch.get_num_threads() > 1 else 2)")

# A model of which each rank holds a part.
SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 6)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""

MIXING = """
    import torch
    from torch import nn

    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x - x.mean(0)

        @staticmethod
        def backward(ctx, grad):
            return grad - grad.mean(0)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in torch.randn(6, 16, 4):
        optimizer.zero_grad()
        Centred.apply(model(x)).square().mean().backward()
        optimizer.step()
"""

# Its gradient depends on the number of rows, and Adam's steps hardly do.
SCALED_GRADIENT = """
    import torch
    from torch import nn

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 16 / len(grad)

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for x in torch.randn(6, 16, 4):
        optimizer.zero_grad()
        Scaled.apply(model(x)).square().mean().backward()
        optimizer.step()
"""
