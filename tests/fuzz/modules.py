"""Programs of modules whose buffers, flags and counters change between calls."""

from __future__ import annotations

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

STEPS = 6

CLASSES = {
    "Counting": """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, h):
        self.calls += 1
        return h / self.calls if self.calls > 2 else h""",
    "Counted": """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))
    def forward(self, h):
        self.calls += 1
        return h * (1 + 1 / self.calls)""",
    "Averaging": """
class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(4))
    def forward(self, h):
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.mean""",
    "Replacing": """
class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('most', torch.ones(()))
    def forward(self, h):
        out = h / self.most
        self.most = torch.maximum(self.most, h.detach().abs().max())
        return out""",
    "Flagged": """
class Flagged(nn.Module):
    flag = False
    def forward(self, h):
        return h * 2 if self.flag else h + 1""",
    "Queue": """
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('queue', torch.zeros(5, 4))
    def forward(self, h):
        out = h + (h @ self.queue.t()).softmax(1) @ self.queue
        self.queue = torch.cat([h.detach(), self.queue])[:5]
        return out""",
    "Previous": """
class Previous(nn.Module):
    kept = None
    def forward(self, h):
        out = h if self.kept is None or self.kept.shape != h.shape else h + 0.5 * self.kept
        self.kept = h.detach()
        return out""",
    "Turning": """
class Turning(nn.Module):
    def forward(self, h):
        return -h if h.amax() > 1 else h * 0.5""",
    "Scaling": """
class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.temperature = 1.0
    def forward(self, h):
        return h * self.scale / self.temperature / h.shape[0]""",
    "Cached": """
class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(4, 4), {}
    def forward(self, h):
        if len(h) not in self.cache:
            self.cache[len(h)] = torch.arange(len(h)).to(h.dtype).unsqueeze(1)
        return self.linear(h) + self.cache[len(h)]""",
    "Frozen": """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, h):
        with torch.no_grad():
            code = self.linear(h).sign()
        return h + (code - h).detach()""",
    "Recurrent": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.GRUCell(4, 4), None
    def forward(self, h):
        if self.state is None or len(self.state) != len(h):
            self.state = torch.zeros(len(h), 4)
        self.state = self.cell(h, self.state.detach())
        return self.state""",
    "Noisy": """
class Noisy(nn.Module):
    std = 0.1
    def forward(self, h):
        return h + self.std * torch.randn_like(h) if self.training else h""",
    "Clamped": """
class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('low', torch.zeros(1, 4)); self.register_buffer('seen', torch.tensor(False))
    def forward(self, h):
        if not self.seen:
            self.low.copy_(h.detach().amin(0, keepdim=True)); self.seen.fill_(True)
        return torch.maximum(h, self.low)""",
}

LAYERS = (
    *(f"{name}()" for name in CLASSES),
    *("nn.Linear(4, 4)", "nn.Linear(4, 4, bias=False)", "nn.BatchNorm1d(4)", "nn.BatchNorm1d(4, momentum=None)"),
    *(
        "nn.BatchNorm1d(4, affine=False)",
        "nn.BatchNorm1d(4, track_running_stats=False)",
        "nn.LayerNorm(4)",
        "nn.Tanh()",
    ),
    *(
        "nn.Dropout(0.3)",
        "nn.GroupNorm(2, 4)",
        "nn.PReLU()",
        "nn.PReLU(4)",
        "nn.Bilinear(4, 4, 4)",
        "nn.ReLU(inplace=True)",
    ),
    *(
        "nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))",
        "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
    ),
    *(
        "nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2), nn.AvgPool1d(2), "
        "nn.Flatten())",
    ),
    *(
        "nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())",
        "nn.Softmax(1)",
    ),
    *(
        "nn.Sequential(nn.Linear(4, 8), nn.GLU())",
        "nn.AlphaDropout(0.2)",
        "nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())",
    ),
)

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([{layers}])
        self.head = nn.Linear(4, 3)
        self.skip = -1
    def forward(self, x, scale=1):
        h = x * scale
        for place, layer in enumerate(self.layers):
            if place != self.skip:
                h = layer(h, h) if isinstance(layer, nn.Bilinear) else layer(h)
        return {out}"""
OUTS = (
    "self.head(h)",
    "self.head(h)",
    "(self.head(h), h)",
    "{'out': self.head(h), 'h': h}",
    "[self.head(h), h.mean(0)]",
)
FIRST = {"(": "out, *_ = net(x)", "{": "out = net(x)['out']", "[": "out = net(x)[0]", "s": "out = net(x)"}

# What happens in a step before the model is called; {k}: the number of a layer.
CHANGES = (
    *(
        "net.train(step % 2 == 0)",
        "net.eval()",
        "net.train()",
        "net.layers[{k}].train(step % 2 == 0)",
        "net.skip = step % 3",
    ),
    *(
        "net.layers[{k}].flag = step % 2 == 0",
        "net.layers[{k}].temperature = 1.0 + step",
        "net.layers[{k}].std = step / 10",
    ),
    *(
        "net.requires_grad_(step % 2 == 0)",
        "net.layers[{k}].requires_grad_(step > 1)",
        "net.head.bias.requires_grad_(step % 2 == 1)",
    ),
    *(
        "net.head.weight.data.mul_(0.9)",
        "net.head.weight.data = net.head.weight.data.flip(0)",
        "nn.init.constant_(net.head.bias, 0.1 * step)",
    ),
    *(
        "kept = copy.deepcopy(net.state_dict()) if step == 1 else kept",
        "net.load_state_dict(kept) if step == 3 else None",
    ),
    *(
        "net = copy.deepcopy(net) if step == 2 else net",
        "for b in net.buffers(): b.data = b.data.clone()",
        "net.zero_grad(set_to_none=False)",
    ),
    *(
        "net.layers[{k}] = nn.Linear(4, 4) if step == 2 else net.layers[{k}]",
        "net.layers.append(nn.Tanh()) if step == 1 else None",
    ),
    *(
        "print(net.layers[{k}](x) if step % 2 else net.layers[0](x))",
        "with torch.no_grad(): print('early', net(x))",
        "net(x)",
    ),
    *(
        "handle = net.head.register_forward_hook(lambda m, i, o: o * 2) if step == 1 else None",
        "handle.remove() if step == 3 else None",
    ),
    *("net.layers[{k}].register_forward_pre_hook(lambda m, i: (i[0] + 0.1,)) if step == 2 else None",),
    *(
        "seen = []\n"
        "if step == 0: net.head.register_forward_hook(lambda m, i, o: seen.append(o.detach().mean().item()))",
    ),
    *(
        "net.double() if step == 2 else None; net.to(x.dtype)",
        "x = x.clone(); x[0] = 0.0",
        "x = x.t().contiguous().t()",
        "x = x[1:]; y = y[1:]",
    ),
    *("net.head.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)) if step == 1 else None", "x = x.flip(0)"),
    *(
        "net.layers.pop(-1) if step == 4 and len(net.layers) > 1 else None",
        "net.head.weight = nn.Parameter(net.head.weight.detach() * 0.5)",
    ),
)
# What happens anywhere in a step, in this order; where it fails, the script goes on.
BETWEEN = (
    *("print('mean', x.mean().item(), len(x), x[0].tolist())", "if x.sum() > 6: continue", "if step == 4: break"),
    *(
        "print(net.head.weight.sum().item(), net.head.bias[0].item())",
        "print([p.grad is None for p in net.parameters()])",
    ),
    *("net.head.weight.data[0].mul_(0.5)", "with torch.no_grad(): net.head.weight.t()[1:].add_(0.1)"),
    *(
        "net.head.weight.detach()[1] = 0.1",
        "net.head.bias.data.numpy()[0] = 0.3",
        "net.state_dict()['head.bias'].zero_()",
    ),
    *("for b in net.buffers(): b.view(-1)[:1].zero_()", "for b in net.buffers(): print(b.sum().item())"),
    *("if net.head.weight.grad is not None: net.head.weight.grad[0].zero_()", "net.head.weight.grad = None"),
    *(
        "row = net.head.weight.data[0] | row.mul_(0.9) | print(row.tolist())",
        "row = net.head.weight.data[0] | del row",
        "del kept",
    ),
    *(
        "row = x[0] | row.mul_(2) | print(row.tolist())",
        "rows = list(x) | del rows[1:] | rows[0].zero_()",
        "array = x.numpy() | array[1] = 0",
    ),
    *("part = x[:, :2]; part.mul_(0.5); del part", "x.view(-1)[::3].zero_()", "x[1:].neg_()", "x.numpy()[0] += 1"),
    *("net(x[:, :3])", "net(x.sum(1))", "net.head(x @ torch.ones(3, 3))", "net.load_state_dict({'nothing': x})"),
    *(
        "h = net.head(x) | h[:, 0].mul_(2) | print(h.sum().item())",
        "h = net.head(x) | h.detach()[0].zero_() | del h | print(net.head(x))",
    ),
    *("average = copy.deepcopy(net) if step == 1 else average", "print('average', average(x))"),
    *(
        "with torch.no_grad():\n"
        "    for a, b in zip(average.state_dict().values(), net.state_dict().values()):\n"
        "        a.copy_(0.5 * a + 0.5 * b if a.is_floating_point() else b)",
        "net.load_state_dict(average.state_dict())",
        "net.load_state_dict({n: v * 0.9 for n, v in net.state_dict().items()})",
    ),
    *(
        "other.weight = net.head.weight | print('other', other(x))",
        "loss = loss + other(x).mean()",
        "net.head = other if step == 3 else net.head",
    ),
    *(
        "net.head.weight = other.weight | other.weight.data.add_(0.1)",
        "print(other.weight.data_ptr() == net.head.weight.data_ptr())",
    ),
    *(
        "tied = nn.Parameter(net.head.weight.detach()) | tied.data.mul_(0.9) | print(tied)",
        "print(net.head.weight.tolist())",
    ),
    *(
        "loss = loss + other(x).square().mean()",
        "optimizer.add_param_group({'params': other.parameters()}) if step == 1 else None",
    ),
    *("net.head.requires_grad_(False)", "net.head.requires_grad_(True)", "other.requires_grad_(step % 2 == 0)"),
)
OBSERVED = (
    "print('state', {n: b for n, b in net.named_buffers()})",
    "print('weight', net.head.weight, net.head.bias)",
)
LOSSES = (
    "F.cross_entropy(out, y)",
    "out.square().mean()",
    "F.mse_loss(out, F.one_hot(y, 3).to(x.dtype))",
    "out.logsumexp(0).sum()",
)


class Modules:
    """A program being drawn."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def program(self) -> Program:
        draws = self.draws
        rows = draws.pick([6, 5, 4, 8, 3, 7, 9, 12])
        total = STEPS * rows - draws.pick([0, 0, rows - 2, 1])
        layers = [draws.pick(LAYERS) for _ in range(draws.number(1, 4))]
        out = draws.pick(OUTS)
        used = [CLASSES[name[:-2]].strip("\n") for name in dict.fromkeys(layers) if name[:-2] in CLASSES]
        rate = draws.pick(["0.1", "0.01"])
        header = [
            "import copy",
            draws.preamble(),
            f"data, labels = torch.randn({total}, 4), torch.randint(3, ({total},))",
            *used,
            NET.strip("\n").replace("{layers}", ", ".join(layers)).replace("{out}", out),
            "net = Net()",
            f"optimizer = torch.optim.SGD(net.parameters(), lr={rate})",
            "kept = copy.deepcopy(net.state_dict())",
            "average, other = copy.deepcopy(net), nn.Linear(4, 3)",
        ]
        body = []
        for _ in range(draws.number(0, 4)):
            body.append(draws.pick(CHANGES).replace("{k}", str(draws.number(0, len(layers) - 1))))
        first = FIRST[out[0]]
        body.append(
            f"{first.replace('(x)', '(x, scale=2)')} if step % 2 else net(x)"
            if first == "out = net(x)" and draws.chance(20)
            else first
        )
        if draws.chance(20):
            body.append(first)
        body.append("optimizer.zero_grad()")
        body.append(f"loss = {draws.pick(LOSSES)}")
        body.append("print('loss', loss.item())")
        body.append("loss.backward()")
        if draws.chance(20):
            body.append("print('gradient', net.head.weight.grad)")
        body.append("optimizer.step()")
        if draws.chance(20):
            body.append(draws.pick(CHANGES).replace("{k}", str(draws.number(0, len(layers) - 1))))
        draws.insert(body, BETWEEN, draws.pick([0, 0, 1, 2, 3]))
        body += OBSERVED
        loop = f"for step, (x, y) in enumerate(DataLoader(TensorDataset(data, labels), batch_size={rows})):"
        end = ("print('end', net.state_dict())", "net.eval()", "with torch.no_grad(): print(net(data[:4]))")
        return Program(tuple(header), loop, tuple(body), end)
