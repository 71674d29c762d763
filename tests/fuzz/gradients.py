"""Programs of differentiable functions: within rows and across them, leaves, second gradients, hooks, checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

STEPS = 4
CLASSES = 3
MOST = 600  # elements of a tensor

FUNCTIONS = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h * weight
    @staticmethod
    def backward(ctx, g):
        h, weight = ctx.saved_tensors
        return g * weight * 2, (g * h).sum_to_size(weight.shape)

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clamp(-1, 1)
    @staticmethod
    def backward(ctx, g):
        return g * 0.5

class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h - h.mean(0)
    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)

class Whitened(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
    @staticmethod
    def forward(h):
        return h / (1 + h.norm())
    @staticmethod
    def backward(ctx, g):
        output, = ctx.saved_tensors
        return g - output * (g * output).sum()
"""

# {0}: a batch, or what was computed of it; {1}: another of the same shape; {d}: its last size; w, v, u: parameters.
WITHIN = (
    *(
        "torch.tanh({0})",
        "F.relu({0})",
        "F.gelu({0})",
        "torch.sigmoid({0})",
        "{0}.exp().clamp(max=5)",
        "F.softplus({0})",
    ),
    *(
        "{0} * u",
        "{0} + u.exp()",
        "{0} * v",
        "{0} + v",
        "v - {0}",
        "{0} @ w",
        "F.linear({0}, w)",
        "F.linear({0}, w, v)",
    ),
    *(
        "F.linear({0}, w.t() @ w)",
        "F.layer_norm({0}, ({d},), v, v)",
        "F.normalize({0}, dim=-1)",
        "{0} / (1 + {0}.abs())",
    ),
    *(
        "F.softmax({0}, -1)",
        "F.log_softmax({0}, -1)",
        "{0}.cumsum(-1)",
        "{0}.flip(-1)",
        "{0}.sort(-1).values",
        "{0}.square()",
    ),
    *("{0} + {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.where({0} > 0, {0}, {1})", "{0}.lerp({1}, 0.3)"),
    *(
        "{0} - {0}.mean(-1, keepdim=True)",
        "{0} * {0}.amax(-1, keepdim=True)",
        "{0}.roll(1, -1)",
        "{0}.pow(3)",
        "F.glu(torch.cat([{0}, {1}], -1))",
    ),
    *(
        "torch.einsum('...i,ij->...j', {0}, w)",
        "{0}.unsqueeze(-2).matmul(w).squeeze(-2)",
        "{0}.detach() * {1}",
        "{0}.sin()",
    ),
    *(
        "checkpoint(lambda h: torch.tanh(h @ w), {0}, use_reentrant=False)",
        "checkpoint(lambda h: F.dropout(h, 0.3) * v, {0}, use_reentrant=False)",
    ),
    *("F.dropout({0}, 0.4)", "Scaled.apply({0}, v)", "Scaled.apply({0}, u)", "Clipped.apply({0})", "{0}.clone()"),
    *(
        "{0}.transpose(0, -1).contiguous().transpose(0, -1)",
        "{0}.masked_fill({0} > 1, 0.5)",
        "F.prelu({0}, u)",
        "{0}.gather(-1, {0}.argsort(-1))",
    ),
    *(
        "torch.stack([{0}, {1}], 1).mean(1)",
        "torch.cat([{0}, {1}], -1)[..., :{d}]",
        "F.pad({0}, (1, 0))[..., 1:]",
        "{0}.abs().sqrt()",
    ),
    *(
        "torch.func.vmap(lambda h: torch.tanh(h) * v)({0})",
        "{0}.chunk(2, -1)[0].repeat_interleave(2, -1)[..., :{d}]",
        "{0}.expand(2, *{0}.shape).mean(0)",
    ),
    *(
        "F.scaled_dot_product_attention({0}[:, None], {1}[:, None], {0}[:, None])[:, 0]",
        "{0}.view({0}.shape[0], -1).view({0}.shape)",
    ),
)
ACROSS = (
    *(
        "{0} - {0}.mean(0)",
        "{0} / ({0}.std(0, unbiased=False) + 1)",
        "{0} * {0}.sum()",
        "F.softmax({0}, 0)",
        "{0}.flip(0)",
        "{0}.roll(1, 0)",
    ),
    *(
        "{0} - {0}.max()",
        "{0} * {0}.amax(0)",
        "{0} + {0}.mean()",
        "{0}.sort(0).values",
        "{0}.cumsum(0)",
        "{0} * {0}.norm()",
    ),
    *(
        "{0}[torch.arange({0}.shape[0]).flip(0)]",
        "{0} - {0}[0]",
        "{0} + {0}[-1:].tanh()",
        "torch.cat([{0}[1:], {0}[:1]])",
        "{0} * {0}.var(0, keepdim=True, unbiased=False)",
    ),
    *(
        "{0} + {0}.logsumexp(0)",
        "{0} * ({0} > 0).float().mean(0)",
        "{0}.flatten(1).softmax(0).view({0}.shape)",
        "{0} + {0}.detach().mean(0)",
    ),
    *(
        "Centred.apply({0})",
        "Whitened.apply({0})",
        "checkpoint(lambda h: h - h.mean(0) * v, {0}, use_reentrant=False)",
        "{0} + {0}.median()",
    ),
    *(
        "(lambda h: (h @ h.t()).softmax(-1) @ h)({0}.flatten(1)).view({0}.shape)",
        "F.batch_norm({0}.flatten(1), None, None, training=True).view({0}.shape)",
    ),
    *(
        "{0} * (1 + torch.cdist({0}.flatten(1), {0}.flatten(1)).mean())",
        "{0}.index_select(0, torch.zeros({0}.shape[0], dtype=torch.long))",
    ),
    *(
        "torch.stack(list({0})).tanh()",
        "{0} - {0}[{0}.flatten(1).sum(1) > 0].sum(0)",
        "torch.zeros_like({0}).index_add(0, torch.zeros({0}.shape[0], dtype=torch.long), {0})",
    ),
)
LOSSES = (
    *(
        "{0}.mean()",
        "{0}.sum()",
        "{0}.square().sum() / 10",
        "{0}.abs().max()",
        "{0}.std()",
        "{0}.norm()",
        "{0}.logsumexp(0).mean()",
    ),
    *(
        "F.mse_loss({0}, {1})",
        "F.l1_loss({0}, {1}.detach())",
        "F.smooth_l1_loss({0}, {1}, reduction='sum')",
        "F.huber_loss({0}, {1})",
    ),
    *(
        "F.cross_entropy({0}.flatten(1)[:, :3], y)",
        "F.cross_entropy({0}.flatten(1)[:, :3], y, weight=torch.tensor([1.0, 2, 3]).to(x.dtype))",
    ),
    *(
        "F.cross_entropy({0}.flatten(1)[:, :3], y, ignore_index=1)",
        "F.cross_entropy({0}.flatten(1)[:, :3], y, label_smoothing=0.1, reduction='sum')",
    ),
    *(
        "F.cross_entropy({0}.flatten(1)[:, :3], y, reduction='none').topk(2).values.sum()",
        "F.nll_loss(F.log_softmax({0}.flatten(1)[:, :3], 1), y)",
    ),
    *(
        "F.binary_cross_entropy_with_logits({0}, ({1} > 0).to(x.dtype))",
        "F.kl_div(F.log_softmax({0}, -1), F.softmax({1}, -1), reduction='batchmean')",
    ),
    *(
        "F.cosine_embedding_loss({0}.flatten(1), {1}.flatten(1), (y > 0) * 2 - 1)",
        "F.triplet_margin_loss({0}, {1}, {0}.flip(0))",
        "F.gaussian_nll_loss({0}, {1}, torch.ones_like({0}))",
    ),
    *(
        "F.multi_margin_loss({0}.flatten(1)[:, :3], y)",
        "F.poisson_nll_loss({0}, {1}.abs())",
        "({0}.flatten(1) @ {0}.flatten(1).t()).logsumexp(1).mean()",
    ),
    *(
        "F.soft_margin_loss({0}, {1}.sign().detach())",
        "{0}[y == 1].sum() + {0}.mean()",
        "{0}.quantile(0.5)",
        "{0}.sum(-1).prod().tanh()",
        "{0}[0].sum()",
        "{0}.var(0).sum()",
    ),
    *(
        "{0}.amin(0).sum()",
        "F.margin_ranking_loss({0}, {1}, torch.ones_like({0}))",
        "F.hinge_embedding_loss({0}, (({1} > 0) * 2 - 1))",
        "{0}.mean(0).square().sum()",
    ),
)

FIRST = ("{0} @ w", "F.linear({0}, w, v)", "{0} * v", "({0} @ w).tanh() * u")
# Values read between other statements; {0}: as above.
READS = (
    *(
        "print({0}.sum().item())",
        "print({0}.tolist())",
        "print({0}[0].tolist())",
        "print({0}.detach().numpy().sum())",
    ),
    *("print(len({0}), [len(row) for row in {0}])", "print(w.grad)", "print('mean', float({0}.mean()), {0}.dtype)"),
    *("if {0}.sum() > 0: print('positive')", "print(bool(({0} > 0).any()), {0}.argmax().item())"),
    *("if {0}.mean() > 1: continue", "print(float(w.norm()), w[0].tolist())", "sums.append({0}.sum().item())"),
    *("sums.append({0}.mean()); print(torch.stack(sums[-2:]).sum().item())", "print(sum(sums))"),
)
# Writes through views without a name; what a function has saved before is not written to.
THROUGH = (
    *(
        "{0}[:, 0].mul_(0.5)",
        "{0}.view(-1)[::2].zero_()",
        "{0}.t()[0].add_(1)",
        "{0}[0].fill_(0.1)",
        "{0}[-1][0] = 1.0",
    ),
    *("{0}.flatten()[1:3] += 1", "{0}.transpose(0, 1)[1:].neg_()", "{0}.unsqueeze(0)[0, 1].tanh_()"),
    *("{0}[:2].copy_({0}[-2:].detach().clone())", "{0}.unbind(1)[0].mul_(u)", "{0}.chunk(2)[0].sub_(v)"),
    *("{0}.detach()[0] = 0.5", "{0}.data[:, 1] *= 2", "{0}.detach().numpy()[0] += 1", "{0}.data[0].mul_(3)"),
    *("{0}.select(-1, 0).add_({0}.sum().detach())", "for row in {0}.data: row += 0.1", "{0}.diagonal().zero_()"),
)
LEAVES = (  # writes to leaves, and to their gradients
    *("with torch.no_grad(): w[0].mul_(0.5)", "w.data[:, 0] = 0.1", "w.data.view(-1)[1:].mul_(0.9)"),
    *("with torch.no_grad(): w.t()[1].add_(v)", "w.detach()[0] *= 0.5", "v.data = v.data.flip(0)"),
    *("if w.grad is not None: w.grad[0].zero_()", "if v.grad is not None: v.grad.data.mul_(2)"),
    *(
        "w.grad = None",
        "w.grad = torch.ones_like(w)",
        "w.requires_grad_(step % 2 == 0)",
        "v.grad = v.detach().clone()",
    ),
    *("with torch.no_grad(): w.diagonal().fill_(1)", "w.data.numpy()[0] = 0.2", "sums.clear()"),
)
FAILS = (  # statements that raise; the script goes on
    *(
        "{0} @ {0}.flatten()[:2]",
        "{0} + torch.ones(7, 13)",
        "{0}.view(17)",
        "{0}[:, 99]",
        "torch.cat([{0}, w[:1, :1]])",
    ),
    *("F.cross_entropy({0}.flatten(1), torch.full((len(x),), 99))", "w.add_(1)", "{0}.sum().item().shape"),
    *("F.linear({0}, w[:, 1:])", "{0}.backward()", "{0}.detach().sum().backward()", "{0}.numpy()"),
)
LEAF_HOOKS = (
    "register_hook(lambda g: g * 2)",
    "register_hook(lambda g: g.clamp(-1, 1))",
    "register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2) is None or None)",  # torch refuses another result
)
PRODUCT = "torch.autograd.functional.hvp(lambda w: torch.tanh(x @ w).square().mean(), w.detach(), torch.ones_like(w))"


class Gradients:
    """A program being drawn. space: its values, as they are in the first step on one device."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "step": 0}
        self.space["print"] = lambda *values: None
        self.batches = ["x"]
        self.body: list[str] = []
        self.watched: list[str] = []  # leaves that are batches

    def program(self) -> Program:
        draws = self.draws
        rows = draws.pick([6, 5, 4, 7, 3, 2, 8, 9, 12])
        self.size = size = draws.pick([4, 3, 5])
        shape = draws.pick([(size,), (size,), (2, size), (3, size)])
        total = STEPS * rows - draws.pick([0, 0, 0, 1, rows - 1])
        header = [
            "from torch.utils.checkpoint import checkpoint",
            draws.preamble(),
            f"data = torch.randn({total}, {', '.join(map(str, shape))})",
            f"labels = torch.randint({CLASSES}, ({total},))",
            f"w, v, u = torch.randn({size}, {size}) / 2, torch.randn({size}), torch.rand(1)",
            "for p in (w, v, u): p.requires_grad_()",
            "sums = []",
        ]
        header += [one.strip("\n") for one in FUNCTIONS.split("\n\n")]
        if draws.chance(15):
            header.append(f"{draws.pick('wvu')}.{draws.pick(LEAF_HOOKS)}")
        for statement in header:
            exec(statement, self.space)
        functions = header[7 : 7 + FUNCTIONS.count("class ")]
        self.space["x"], self.space["y"] = self.space["data"][:rows].clone(), self.space["labels"][:rows]
        if draws.chance(70):
            self.body.append("w.grad = v.grad = u.grad = None")
        self._leaves()
        if draws.chance(85):
            self._say(f"h = {draws.pick(FIRST).format(self.batches[-1])}")
            self.batches += ["h"] * ("h" not in self.batches)
        for _ in range(draws.number(1, 6)):
            self._statement()
        self._loss()
        self.body += [
            *("print('w', w.grad)", "print('v', v.grad)", "print('u', u.grad)"),
            *(f"print('{name}', {name}.grad)" for name in self.watched),
        ]
        if draws.chance(50):
            self.body.append("if w.grad is not None: w.data -= 0.1 * w.grad.clamp(-1, 1)")
        loop = f"for step, (x, y) in enumerate(DataLoader(TensorDataset(data, labels), batch_size={rows})):"
        torch.set_default_dtype(torch.float32)
        text = "".join(self.body)
        unused = [one for one in functions if one.split("(")[0].split()[1] not in text]
        return Program(tuple(one for one in header if one not in unused), loop, tuple(self.body))

    def _run(self, statement: str) -> bool:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(statement, self.space)
        except Exception:
            return False
        return True

    def _say(self, statement: str) -> bool:
        """Add a statement, if it runs on one device."""
        if self._run(statement.replace("continue", "pass")):
            self.body.append(statement)
            return True
        return False

    def _leaves(self) -> None:
        kind = self.draws.pick(["none", "none", "itself", "delta", "copy"])
        if kind == "itself":
            self._say("x.requires_grad_()")
            self.watched.append("x")
        elif kind == "delta":
            self._say("delta = torch.zeros_like(x).requires_grad_()")
            self._say("h = x + delta")
            self.watched.append("delta")
            self.batches.append("h")
        elif kind == "copy":
            self._say("z = x.detach().clone().requires_grad_()")
            self.watched.append("z")
            self.batches.append("z")

    def _pair(self) -> tuple[str, str]:
        one = self.draws.pick(self.batches[::-1])
        alike = [name for name in self.batches if self.space[name].shape == self.space[one].shape]
        return one, self.draws.pick(alike[::-1])

    def _expression(self, forms: tuple[str, ...]) -> tuple[str, Tensor] | None:
        for _ in range(6):
            one, other = self._pair()
            expression = self.draws.pick(forms).replace("{0}", one).replace("{1}", other)
            expression = expression.replace("{d}", str(self.space[one].shape[-1]))
            if self._run(f"made = {expression}"):
                made = self.space["made"]
                if isinstance(made, Tensor) and made.numel() <= MOST and made.isfinite().all():
                    return expression, made
        return None

    def _statement(self) -> None:
        draws = self.draws
        kind = draws.pick(
            ["within"] * 3
            + ["across"] * 2
            + ["either"] * 2
            + [
                "hook",
                "write",
                "no_grad",
                "part",
                "warm",
                "read",
                "read",
                "through",
                "leaf",
                "fails",
                "drop",
                "early",
            ]
        )
        name = draws.pick("habc")
        if kind in ("within", "across"):
            found = self._expression(WITHIN if kind == "within" else ACROSS)
            if found is not None and self._say(f"{name} = {found[0]}") and name not in self.batches:
                self.batches.append(name)
        elif kind == "either":
            first, second = self._expression(WITHIN + ACROSS), self._expression(WITHIN + ACROSS)
            if first is not None and second is not None and first[1].shape == second[1].shape:
                self._say(f"{name} = {second[0]} if step % 2 else {first[0]}")
                if name not in self.batches:
                    self.batches.append(name)
        elif kind == "hook":
            one = draws.pick(self.batches)
            if one != "x" and self.space[one].requires_grad:
                hook = draws.pick(
                    ["register_hook(lambda g: g * 3)", "register_hook(lambda g: g - g.mean())", "retain_grad()"]
                )
                if self._say(f"{one}.{hook}") and hook == "retain_grad()":
                    self.watched.append(one)
        elif kind == "write":
            one = draws.pick(self.batches)
            write = draws.pick(
                [
                    "{0} *= 2",
                    "{0}[:, 0] = 0.5",
                    "{0}[0] = 1.0",
                    "{0}.mul_(u)",
                    "{0}.add_(x.detach())",
                    "{0}[{0} > 0] *= 0.5",
                    "{0}.relu_()",
                    "{0}[:, 1:] += {0}[:, :-1].detach()",
                ]
            )
            if one != "x" and self._say(f"{one} = {one}.clone()"):
                self._say(write.replace("{0}", one))
        elif kind == "no_grad":
            found = self._expression(WITHIN + ACROSS)
            if (
                found is not None
                and self._say(f"with torch.no_grad(): {name} = {found[0]}")
                and name not in self.batches
            ):
                self.batches.append(name)
        elif kind == "part":
            one = draws.pick(self.batches)
            part = draws.pick(
                [
                    "{0}[:, :2]",
                    "{0}[:, -1:]",
                    "{0}[1:]",
                    "{0}.mean(-1, keepdim=True)",
                    "{0}.flatten(1)",
                    "{0}.unsqueeze(1)",
                    "{0}.sum(0)",
                    "{0}.amax(1)",
                ]
            )
            if (
                self._say(f"{name} = {part.replace('{0}', one)}")
                and name not in self.batches
                and self.space[name].ndim > 1
            ):
                self.batches.append(name)
        elif kind == "read":
            self._say(draws.pick(READS).replace("{0}", draws.pick(self.batches)))
        elif kind == "through":
            one = draws.pick(self.batches)
            if one not in self.watched and self._say(f"{one} = {one}.clone()"):
                for _ in range(draws.number(1, 2)):
                    self._say(draws.pick(THROUGH).replace("{0}", one))
        elif kind == "leaf":
            self._say(draws.pick(LEAVES))
        elif kind == "fails":
            self.body.append(draws.pick(FAILS).replace("{0}", draws.pick(self.batches)))
        elif kind == "drop":
            name = draws.pick(self.batches)
            if name != "x" and name not in self.watched and self._say(f"del {name}"):
                self.batches.remove(name)
        elif kind == "early":  # a backward pass before the others
            found = self._expression(LOSSES)
            if found is not None:
                self._say(f"({found[0]}).backward(retain_graph=True)")
        else:
            found = self._expression(WITHIN)
            if found is not None:
                self._say(f"for _ in range(3): {found[0]}")

    def _loss(self) -> None:
        draws = self.draws
        expressions = [found[0] for _ in range(draws.number(1, 2)) if (found := self._expression(LOSSES))]
        self.body.append(f"loss = {' + '.join(expressions) or '(x @ w).sum()'}")
        shown = draws.pick(self.batches)
        self.body += [f"print({shown!r}, {shown})", "print('loss', loss.item())"]
        wanted = draws.pick(["w", "w, v, u", *(f"w, {name}" for name in self.watched), *(self.watched or ["v"])])
        unused = ", allow_unused=True"
        kind = draws.pick(["backward"] * 3 + ["penalty", "grad", "twice", "second", "vector", "hvp"])
        if kind == "penalty":
            self.body += [
                f"grads = torch.autograd.grad(loss, [{wanted}], create_graph=True{unused})",
                "penalty = sum(g.square().sum() for g in grads if g is not None)",
                "print('penalty', penalty.item())",
                "(loss + 0.1 * penalty).backward()",
            ]
        elif kind == "grad":
            self.body += [
                f"print('grad', torch.autograd.grad(loss, [{wanted}], retain_graph=True{unused}))",
                "loss.backward()",
            ]
        elif kind == "twice":
            self.body += ["loss.backward(retain_graph=True)", "loss.backward()"]
        elif kind == "second":
            self.body += [
                f"first, *_ = torch.autograd.grad(loss, [{wanted}], create_graph=True{unused})",
                f"print('second', torch.autograd.grad(first.sum(), [{wanted}], retain_graph=True{unused}))",
                "loss.backward()",
            ]
        elif kind == "vector":
            one = draws.pick(self.batches)
            self.body.append(f"({one} * 1.0 + 0 * u).backward(torch.ones_like({one}) * 0.1)")
        elif kind == "hvp":
            self.body += [
                f"print('hvp', {PRODUCT})",
                "loss.backward()",
            ]
        else:
            self.body.append("loss.backward()")
