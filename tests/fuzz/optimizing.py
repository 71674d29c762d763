"""Programs of optimizers, schedules, clipping, averages of weights, and weights that are exchanged."""

from __future__ import annotations

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

STEPS = 6
OPTIMIZERS = (
    *(
        "SGD({p}, lr=0.1)",
        "SGD({p}, lr=0.05, momentum=0.9)",
        "SGD({p}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    ),
    *(
        "Adam({p}, lr=0.01)",
        "AdamW({p}, lr=0.01, amsgrad=True)",
        "RMSprop({p}, lr=0.01, momentum=0.5, centered=True)",
    ),
    *(
        "Adagrad({p}, lr=0.1)",
        "Adadelta({p}, lr=1.0)",
        "NAdam({p}, lr=0.01)",
        "RAdam({p}, lr=0.01)",
        "Adamax({p}, lr=0.01)",
    ),
    *(
        "ASGD({p}, lr=0.1)",
        "Rprop({p}, lr=0.01)",
        "LBFGS(net.parameters(), lr=0.1, max_iter=3)",
        "SGD({p}, lr=0.1, maximize=True)",
    ),
    *(
        "Adam({p}, lr=0.01, foreach=True)",
        "SGD({p}, lr=0.1, foreach=True)",
        "Adam({p}, lr=0.01, fused=True)",
        "AdamW({p}, lr=0.01, foreach=False)",
    ),
)
GROUPS = (
    *("net.parameters()",) * 3,
    "[{'params': net[0].parameters()}, {'params': net[2].parameters(), 'lr': 0.02}]",
    "[p for n, p in net.named_parameters() if 'bias' not in n]",
    "[*net.parameters(), free]",
    "[net[2].weight]",
)
SCHEDULES = (
    *("StepLR(optimizer, 2, gamma=0.5)", "CosineAnnealingLR(optimizer, 4)", "ExponentialLR(optimizer, 0.9)"),
    *("LambdaLR(optimizer, lambda n: 1 / (1 + n))", "ReduceLROnPlateau(optimizer, patience=0, factor=0.5)"),
    *(
        "ChainedScheduler([torch.optim.lr_scheduler.StepLR(optimizer, 2), "
        "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])",
    ),
    *(
        "CosineAnnealingWarmRestarts(optimizer, 2)",
        "MultiStepLR(optimizer, [1, 3], 0.1)",
        "LinearLR(optimizer, total_iters=3)",
    ),
)
NETS = (
    *("nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))",) * 3,
    "nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))",
    "nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3, bias=False))",
    "nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))",
)
# Between the backward pass and the optimizer's step.
GRADIENTS = (
    *(
        "nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
        "print('norm', nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())",
    ),
    *(
        "nn.utils.clip_grad_value_(net.parameters(), 0.05)",
        "nn.utils.clip_grad_norm_(net[0].parameters(), 0.1)",
        "nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=float('inf'))",
    ),
    *(
        "for p in net.parameters(): p.grad.mul_(0.5)",
        "for p in net.parameters(): p.grad = p.grad / 2",
        "for p in net.parameters(): p.grad += 0.01 * torch.randn_like(p)",
    ),
    *(
        "print('norms', [p.grad.norm().item() for p in net.parameters()])",
        "net[0].weight.grad = None",
        "net[0].bias.grad.zero_()",
        "net[2].weight.grad[0] = 0",
    ),
    *(
        "total = torch.stack([p.grad.norm() for p in net.parameters()]).norm(); print('total', total.item())",
        "for p in net.parameters(): p.grad.sign_()",
    ),
    *(
        "print('vector', torch.cat([p.grad.flatten() for p in net.parameters()])[:5])",
        "if any(p.grad.isnan().any() for p in net.parameters()): continue",
    ),
    *(
        "print('nets', nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())",
        "optimizer.zero_grad() if step == 2 else None",
    ),
)
# After the step.
WEIGHTS = (
    *(
        "with torch.no_grad():\n    for a, p in zip(average.parameters(), net.parameters()): a.lerp_(p, 0.2)",
        "for a, p in zip(average.parameters(), net.parameters()): a.data.mul_(0.9).add_(p.data, alpha=0.1)",
    ),
    *(
        "average.load_state_dict(net.state_dict()) if step % 3 == 2 else None",
        "net.load_state_dict(average.state_dict()) if step == 3 else None",
        "net[0].weight.data.clamp_(-0.3, 0.3)",
    ),
    *(
        "with torch.no_grad(): net[2].weight /= net[2].weight.norm(dim=1, keepdim=True)",
        "with torch.no_grad(): net[0].weight.copy_(average[0].weight)",
        "swa.update_parameters(net)",
    ),
    *(
        "net[0].weight.data, average[0].weight.data = average[0].weight.data, net[0].weight.data",
        "optimizer.param_groups[0]['lr'] *= 0.5",
        "print('lr', [g['lr'] for g in optimizer.param_groups])",
    ),
    *(
        "vector = nn.utils.parameters_to_vector(net.parameters()); print('size', vector.norm().item())",
        "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()) * 0.9, net.parameters())",
    ),
    *(
        "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())) if step == 2 else None",
        "print('state', [v for s in optimizer.state_dict()['state'].values() for v in s.values()])",
        "nn.init.zeros_(net[2].weight) if step == 2 else None",
    ),
    *(
        "optimizer.state.clear() if step == 3 else None",
        "with torch.no_grad(): net[0].weight[0] = 0",
        "net[0].weight.data.add_(torch.randn_like(net[0].weight), alpha=0.01)",
        "net[0].requires_grad_(step % 2 == 0)",
    ),
    *(
        "with torch.no_grad():\n    for p in net.parameters(): p.sub_(0.01 * p)",
        "backup = [p.detach().clone() for p in net.parameters()] if step == 1 else backup",
        "for p, b in zip(net.parameters(), backup): p.data = b.clone()",
    ),
    *(
        "optimizer.add_param_group({'params': [extra]}) if step == 1 else None",
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.05) if step == 2 else optimizer",
        "print('equal', torch.equal(net[0].weight, average[0].weight), (net[0].weight > 0).sum().item())",
    ),
    *(
        "print('shapes', [(tuple(p.shape), p.stride(), p.is_leaf, p.requires_grad) for p in net.parameters()])",
        "net[0].weight = nn.Parameter(net[0].weight.detach().clone()) if step == 1 else net[0].weight",
        "print('count', sum(p.numel() for p in net.parameters()))",
    ),
)
# Anywhere in a step, in this order; where it fails, the script goes on.
BETWEEN = (
    *("print('mean', x.mean().item(), len(x), x[0].tolist())", "if x.sum() > 4: continue", "if step == 4: break"),
    *(
        "if loss > 1.5: continue",
        "if loss.item() < 0.9: break",
        "losses.append(loss.item()); print(sum(losses) / len(losses))",
    ),
    *(
        "losses.append(loss.detach()); print(torch.stack(losses[-2:]).mean().item())",
        "best = min(best, loss.item()); print(best)",
    ),
    *("if loss < best: best, kept = loss.detach(), copy.deepcopy(net.state_dict())", "net.load_state_dict(kept)"),
    *("net[0].weight.data[0].mul_(0.5)", "with torch.no_grad(): net[0].weight.t()[1:].add_(0.1)"),
    *(
        "row = net[0].weight.data[0] | row.mul_(0.9) | print(row.tolist())",
        "row = net[0].weight.data[0] | del row",
        "del kept",
        "del loss",
    ),
    *(
        "net[0].weight.grad[0].zero_()",
        "net[2].weight.grad.t()[1].mul_(2)",
        "grad = net[0].weight.grad | print(grad)",
    ),
    *(
        "grad = net[0].weight.grad | grad.view(-1)[0] = 0.5",
        "grad = net[2].weight.grad | grad.mul_(0) | del grad",
        "net[2].weight.grad = net[2].weight.grad.clone()",
    ),
    *("net[2].weight.grad = None", "net.zero_grad()", "net.zero_grad(set_to_none=False)", "optimizer.zero_grad()"),
    *("for s in optimizer.state.values():\n    for v in s.values(): v.view(-1)[:1].zero_()",),
    *("for s in optimizer.state.values(): print([v.sum().item() for v in s.values() if v.ndim])",),
    *("for s in optimizer.state.values():\n    for v in s.values(): v.mul_(0.5) if v.ndim else None",),
    *("net(x[:, :3])", "net(x.sum(1))", "F.cross_entropy(net(x), y + 3)", "optimizer.load_state_dict({})"),
    *("net(x).mean().backward()", "net(x).square().backward()", "loss.backward()", "free.sum().backward()"),
    *(
        "buffer = io.BytesIO(); torch.save([net.state_dict(), optimizer.state_dict()], buffer)"
        " | buffer.seek(0); net.load_state_dict(torch.load(buffer)[0])"
        " | buffer.seek(0); optimizer.load_state_dict(torch.load(buffer)[1])",
        "saved = optimizer.state_dict() | optimizer.load_state_dict(saved)",
        "saved = copy.deepcopy(optimizer.state_dict()) | optimizer.load_state_dict(saved)",
    ),
    *(
        "net[2].weight.register_hook(lambda g: g * 2) if step == 1 else None",
        "net[0].weight.register_hook(lambda g: g.clamp(-.1, .1)) if step == 2 else None",
    ),
    *("print('steps', [s.get('step') for s in optimizer.state.values()])", "net[2].bias = net[2].bias"),
    *(
        "tied = nn.Parameter(net[2].weight.detach()); tied.data.mul_(0.9)",
        "net[0].weight, average[0].weight = average[0].weight, net[0].weight",
    ),
    *("optimizer.param_groups[0]['params'][0].data.mul_(0.9)", "optimizer.param_groups[0]['weight_decay'] = 0.1"),
    *("for p in net.parameters(): p.requires_grad_(not p.requires_grad)", "net.requires_grad_(True)"),
    *(
        "with torch.no_grad(): loss = F.cross_entropy(net(x), y)",
        "optimizer.step()",
        "del optimizer.state[net[0].weight]",
    ),
    *("print('grads', [None if p.grad is None else p.grad.norm().item() for p in net.parameters()])",),
    *(
        "torch._foreach_mul_([p.grad for p in net.parameters()], 0.5)",
        "torch._foreach_add_([p.data for p in net.parameters()], 0.01)",
    ),
    *("with torch.no_grad(): torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.1)",),
)
LOSSES = (
    *("F.cross_entropy({out}, y)",) * 3,
    "F.cross_entropy({out}, y) + 0.01 * sum(p.square().sum() for p in net.parameters())",
    "F.cross_entropy({out} * free + extra, y)",
    "F.mse_loss({out}, average(x).detach())",
    "F.cross_entropy({out}, y, reduction='none').sort().values[:3].sum()",
    "(F.cross_entropy(net[:2](x).tanh()[:, :3], y) if step % 2 else F.cross_entropy({out}, y))",
)

ZEROED = (
    *("optimizer.zero_grad()",) * 2,
    *("optimizer.zero_grad(set_to_none=False)", "net.zero_grad()", "if step % 2 == 0: optimizer.zero_grad()"),
)


class Optimizing:
    """A program being drawn."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws

    def program(self) -> Program:
        draws = self.draws
        rows = draws.pick([6, 5, 4, 8, 3, 7, 9, 12])
        total = STEPS * rows - draws.pick([0, 0, 0, rows - 1, 1])
        optimizer = draws.pick(OPTIMIZERS).replace("{p}", draws.pick(GROUPS))
        header = [
            "import copy, io",
            draws.preamble(),
            f"data, labels = torch.randn({total}, 4), torch.randint(3, ({total},))",
            f"net = {draws.pick(NETS)}",
            "free, extra = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(3))",
            "average = copy.deepcopy(net).requires_grad_(False)",
            "swa = torch.optim.swa_utils.AveragedModel(net)",
            f"optimizer = torch.optim.{optimizer}",
            "losses, backup, best, kept = [], [], 9.0, copy.deepcopy(net.state_dict())",
        ]
        schedule = draws.pick(["", draws.pick(SCHEDULES)])
        if schedule:
            header.append(f"schedule = torch.optim.lr_scheduler.{schedule}")
        loss = draws.pick(LOSSES).replace("{out}", "net(x)")
        if optimizer.startswith("LBFGS"):
            closure = (
                f"def closure():\n    optimizer.zero_grad()\n    loss = {loss}\n    loss.backward()\n    return loss"
            )
            body = [closure, "loss = optimizer.step(closure)", "print('loss', loss.item())"]
        else:
            body = [f"loss = {loss}", "print('loss', loss.item())"]
            body.append(draws.pick(ZEROED))
            body.append("loss.backward()")
            body += [draws.pick(GRADIENTS) for _ in range(draws.pick([0, 1, 1, 2]))]
            body.append(draws.pick(["optimizer.step()"] * 3 + ["if step % 2: optimizer.step()"]))
        if schedule:
            body += [
                "schedule.step(loss.item())" if "Plateau" in schedule else "schedule.step()",
                "print('lr', schedule.get_last_lr())",
            ]
        body += [draws.pick(WEIGHTS) for _ in range(draws.number(0, 3))]
        if draws.chance(20):
            body.append("net.eval(); print('evaluated', net(x).argmax(1)); net.train()")
        if draws.chance(15):
            body = ["x = x.t().contiguous().t() if step % 2 else x", *body]
        draws.insert(body, BETWEEN, draws.pick([0, 0, 1, 2, 3]))
        body.append("print('weights', net.state_dict())")
        loop = f"for step, (x, y) in enumerate(DataLoader(TensorDataset(data, labels), batch_size={rows})):"
        end = (
            "print('average', average.state_dict())",
            "print('swa', swa.state_dict())",
            "print('free', free, extra)",
        )
        return Program(tuple(header), loop, tuple(body), end)
