"""Programs of datasets, loaders, samplers, batch sizes, last batches and accumulated gradients."""

from __future__ import annotations

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

CLASSES = {
    "Rows": """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return len(data)
    def __getitem__(self, i): return data[i], labels[i]""",
    "Named": """
class Named(torch.utils.data.Dataset):
    def __len__(self): return len(data)
    def __getitem__(self, i): return {'x': data[i], 'y': labels[i].item(), 'name': f'row {i}', 'i': i}""",
    "Stream": """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return iter([(x, y) for x, y in zip(data, labels)])""",
    "Noisy": """
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return len(data)
    def __getitem__(self, i): return data[i] + torch.randn(4) * 0.1, labels[i]""",
    "Pairs": """
class Pairs(torch.utils.data.Dataset):
    def __len__(self): return len(data) - 1
    def __getitem__(self, i): return (data[i], data[i + 1]), int(labels[i])""",
    "Ragged": """
class Ragged(torch.utils.data.Dataset):
    def __len__(self): return len(data)
    def __getitem__(self, i): return data[i][: 1 + i % 4], labels[i]""",
    "Counting": """
class Counting(torch.utils.data.Dataset):
    seen = 0
    def __len__(self): return len(data)
    def __getitem__(self, i):
        self.seen += 1
        return data[i], labels[i]""",
    "Alternate": """
class Alternate(torch.utils.data.Sampler):
    def __init__(self, count): self.count, self.epoch = count, 0
    def __len__(self): return self.count
    def __iter__(self):
        self.epoch += 1
        return iter(sorted(range(self.count), key=lambda i: (i % 2, i) if self.epoch % 2 else -i))""",
    "padded": """
def padded(samples):
    xs, ys = zip(*samples)
    return F.pad(nn.utils.rnn.pad_sequence(xs, batch_first=True), (0, 4))[:, :4], torch.stack(ys)""",
    "stacked": """
def stacked(samples):
    return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])""",
}
PLAIN = "x, y"
# A dataset, and what a batch of it is.
DATASETS = (
    *(("TensorDataset(data, labels)", PLAIN),) * 4,
    *(("Rows()", PLAIN), ("list(zip(data, labels))", PLAIN), ("Noisy()", PLAIN), ("Counting()", PLAIN)),
    *(("Named()", "b"), ("Named()", "b"), ("Pairs()", "(x, z), y"), ("Stream()", PLAIN), ("Ragged()", "padded")),
    ("torch.utils.data.Subset(TensorDataset(data, labels), range(1, len(data), 2))", PLAIN),
    ("torch.utils.data.ConcatDataset([TensorDataset(data, labels), TensorDataset(-data, labels)])", PLAIN),
    ("torch.utils.data.random_split(TensorDataset(data, labels), [0.7, 0.3])[0]", PLAIN),
    ("torch.utils.data.StackDataset(x=data, y=labels)", "b"),
)
SAMPLERS = (
    *(
        "",
        "",
        "shuffle=True",
        "shuffle=True",
        "shuffle=True, generator=torch.Generator().manual_seed(3)",
        "sampler=Alternate({n})",
    ),
    *(
        "sampler=torch.utils.data.WeightedRandomSampler(torch.rand({n}), {n})",
        "sampler=torch.utils.data.RandomSampler(range({n}), replacement=True, num_samples=11)",
    ),
    *("sampler=torch.utils.data.SubsetRandomSampler(range({n} // 2))", "sampler=list(range({n}))[::-1]"),
    "batch_sampler=torch.utils.data.BatchSampler(range({n}), {b}, False)",
    "batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8], [1, 1]]",
)
# What is done in a step with the batch, before the model; only with x and y.
CHANGES = (
    *(
        "x = x[: len(x) // 2 + 1]; y = y[: len(y) // 2 + 1]",
        "x = torch.cat([x, x.flip(0)]); y = torch.cat([y, y.flip(0)])",
        "x = x + 0.1 * torch.randn_like(x)",
    ),
    *(
        "order = torch.randperm(len(x)); x = x[order]; y = y[order]",
        "lam = torch.rand(()).item(); x = lam * x + (1 - lam) * x.flip(0)",
        "if len(x) < 3: continue",
    ),
    *(
        "keep = y > 0; x, y = (x[keep], y[keep]) if keep.any() else (x, y)",
        "x, y = x.to('cpu', non_blocking=True), y.long()",
        "x = x.clone(); x[0] = 0.0",
    ),
    *(
        "print('rows', [row.sum().item() for row in x])",
        "print('first', x[0], y[-1].item(), len(x), x.size(0), y.numel())",
        "if step == 3: break",
    ),
    *(
        "x, y = x.view(-1, 4), y.view(-1)",
        "if step % 2: continue",
        "print('unique', y.unique(), torch.bincount(y, minlength=3))",
        "for part in x.split(2): print('part', part.shape, part.sum().item())",
    ),
    *(
        "print('zip', [(a.sum().item(), b.item()) for a, b in zip(x, y)])",
        "total = total + x.sum(); print('total', total.item())",
        "seen.append(x); print('seen', sum(one.sum().item() for one in seen[-2:]))",
    ),
    *(
        "print('both', torch.cat(seen[-2:]).mean().item() if seen else None); seen.append(x)",
        "correct = (net(x).argmax(1) == y).float().mean().item(); print('correct', correct)",
    ),
)

NETS = (
    *("nn.Linear(4, 3)", "nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))"),
    "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3))",
)
OPTIMIZERS = (
    *("SGD(net.parameters(), lr=0.1)", "Adam(net.parameters(), lr=0.01)"),
    "SGD(net.parameters(), lr=0.1, momentum=0.9)",
)
LOSSES = (
    *("F.cross_entropy(net(x), y)", "net(x).square().sum(1).mean()"),
    "F.cross_entropy(net(x), y, reduction='sum') / len(data)",
)
STEPS = (
    *(["optimizer.zero_grad()", "loss.backward()", "optimizer.step()"],) * 2,
    ["(loss / 2).backward()", "if step % 2: optimizer.step(); optimizer.zero_grad()"],
    [
        "optimizer.zero_grad()",
        "for a, b in zip(x.split(2), y.split(2)):\n"
        "    (F.cross_entropy(net(a), b, reduction='sum') / len(x)).backward()",
        "optimizer.step()",
    ],
    ["loss.backward()", "if step % 3 == 2 or step + 1 == len(loader): optimizer.step(); optimizer.zero_grad()"],
)
EVALUATED = (
    "with torch.no_grad():\n"
    "    print('evaluated', sum(F.cross_entropy(net(x), y, reduction='sum').item() for x, y in loader))"
)


class Loading:
    """A program being drawn."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def program(self) -> Program:
        draws = self.draws
        total = draws.pick([7, 10, 13, 16, 17, 19, 21])
        size = draws.pick([1, 2, 3, 4, 5, 6, 8, total, total - 1, total + 3])
        dataset, batch = draws.pick(DATASETS)
        sampler = "" if "Stream" in dataset else draws.pick(SAMPLERS)
        given = [f"batch_size={size}"] if "batch_sampler" not in sampler else []
        rows = {
            "Subset": total // 2,
            "Pairs": total - 1,
            "Concat": 2 * total,
            "random_split": total - int(0.3 * total),
        }
        number = next((value for name, value in rows.items() if name in dataset), total)
        given += [sampler.replace("{n}", str(number)).replace("{b}", str(size))] if sampler else []
        if "batch_sampler" not in sampler and draws.chance(20):
            given.append("drop_last=True")
        if batch == "padded":
            given.append("collate_fn=padded")
        elif batch == PLAIN and draws.chance(15):
            given.append("collate_fn=stacked")
        text = f"{dataset} {' '.join(given)}"
        header = [
            draws.preamble(),
            f"data, labels = torch.randn({total}, 4), torch.randint(3, ({total},))",
            *(code.strip("\n") for name, code in CLASSES.items() if f"{name}(" in text or f"={name}" in text),
            f"net = {draws.pick(NETS)}",
            f"optimizer = torch.optim.{draws.pick(OPTIMIZERS)}",
            f"loader = DataLoader({dataset}, {', '.join(given)})",
            "seen, total = [], 0.0",
        ]
        body: list[str] = []
        if batch == "b":
            body += ["x, y = b['x'], b['y']", "print({name: value for name, value in b.items() if name not in 'xy'})"]
        if "z" in batch:
            body.append("x = x - 0.5 * z")
        body += [draws.pick(CHANGES) for _ in range(draws.number(0, 3))]
        body.append("print('batch', x, y)")
        loss = draws.pick(LOSSES)
        body.append(f"loss = {loss}")
        body += draws.pick(STEPS)
        body.append("print('loss', loss.item())")
        name = {"padded": PLAIN}.get(batch, batch)
        loops = [
            f"for epoch, step, ({name}) in ((e, s, batch) for e in range(2) for s, batch in enumerate(loader)):",
            f"for step, ({name}) in enumerate(loader):",
            f"for step, ({name}) in enumerate([*loader, *loader]):",
            f"for step, ({name}) in zip(range(3), loader):",
        ]
        end = ["print('end', net.state_dict())", "print(len(loader))"]
        if batch == PLAIN:
            end.append(EVALUATED)
            end.append("x, y = next(iter(loader)); print('next', x, y)")
        if "Counting" in dataset:
            end.append("print('read', loader.dataset.seen >= 0)")
        return Program(tuple(header), draws.pick([loops[0], loops[0], *loops]), tuple(body), tuple(end))
