"""Programs that set the data and the gradients of parameters to other tensors, keep parts of these, and train on."""

from __future__ import annotations

from math import prod

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

Shape = tuple[int, ...]
STEPS = 3
PARAMETERS: dict[str, Shape] = {
    "net[0].weight": (4, 4),
    "net[2].weight": (4, 4),
    "net[0].bias": (4,),
    "net[2].bias": (4,),
    "net.last": (4, 3),
}
OPTIMIZERS = ("SGD({p}, 0.1)", "SGD({p}, 0.1, momentum=0.9)", "AdamW({p}, 0.05)", "RMSprop({p}, 0.05, foreach=True)")
# {n}: entries; {s}: sizes; {p}: a parameter of this shape.
PLAIN = (
    *("torch.full(({s},), 0.5)", "torch.zeros({s})", "torch.linspace(-1, 1, {n}).view({s})", "torch.randn({s})"),
    *("torch.zeros({n} + 5)[2:-3].view({s})", "torch.from_numpy(np.ones(({s},)))", "torch.zeros_like({p})"),
    *("{p}.detach().clone()", "{p}.data * 0.5", "torch.from_numpy({p}.detach().numpy().copy())"),
)
OF_GRADIENT = ("{p}.grad", "{p}.grad.data", "{p}.grad.clone()")
PARTS = ("[0]", "[1:]", "[..., 0]", "[:]", ".view(-1)", ".t()", ".flatten()[::2]")
# {t}, {u}: tensors of the shape of {p}; {v}: a part.
WRITES = (
    *("{t}.mul_(1.5)", "{t}.add_({u})", "{t}.zero_()", "{t}[0] = 0.25", "{t}[..., 1] += 1", "{t}.copy_({u})"),
    *("{t}.data.add_(0.1)", "torch._foreach_mul_([{t}, {u}], 0.5)", "{t}.numpy()[...] *= 2", "{t}.sub_({p}.data)"),
    *("{t}.add_({p}.grad)", "{t}.fill_(step + 0.5)", "torch.add({t}, 1, out={t})", "{p}.detach().numpy()[0] += 1"),
    *("{p}.data.mul_(0.9)", "{p}.add_({t})", "{p}.data[1] = 0.3", "{p}.copy_({t})", "{p}.lerp_({t}, 0.1)"),
    *("{p}.grad.mul_(0.5)", "{p}.grad.copy_({t})", "{p}.grad[0].zero_()", "{p}.grad.zero_()", "{p}[0] = {t}[1]"),
    *("{p}.grad.data.clamp_(-0.2, 0.2)", "{v}.mul_(2)", "{v}.zero_()", "{v}.add_(0.5)", "{v}[0] = 1"),
)
TRAINING = (
    *("net(x).square().mean().backward()", "(net(x) @ net.last).sin().mean().backward()", "optimizer.step()"),
    *(
        "net.zero_grad(); net(x).square().mean().backward()",
        "torch.autograd.backward([net(x).mean(), net.last.sum()])",
    ),
    *("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "net.zero_grad(set_to_none=False)"),
    *("nn.utils.clip_grad_norm_(net.parameters(), 0.3)", "nn.utils.clip_grad_value_(net.parameters(), 0.1)"),
    *("{p}.requires_grad_(step % 2 == 0)", "{p}.grad = None", "(net(x) @ net.last).sum().backward()"),
)
MODEL = (
    *("state = net.state_dict()", "state = copy.deepcopy(net.state_dict())", "net.load_state_dict(state)"),
    *("vector = nn.utils.parameters_to_vector(net.parameters()).detach()", "vector.mul_(0.9)"),
    *("nn.utils.vector_to_parameters(vector, net.parameters())", "twin = copy.deepcopy(net)"),
    *("net.load_state_dict(twin.state_dict())", "with torch.no_grad(): state['0.weight'].mul_(0.8)"),
)


class Setting:
    """The choices of one program."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._shapes: dict[str, Shape] = {}  # of variables
        self._parts: list[str] = []
        self._uses: dict[str, str] = {}  # what a variable is: two of these would change each other while a pass runs

    def program(self) -> Program:
        draws = self._draws
        before = [self._new(shape, PLAIN) for shape in draws.shuffled([(4, 4), (4,), (4, 3)])[: draws.number(0, 3)]]
        before += [self._set() for _ in before]
        if draws.chance(50):
            before.append("net(data[:4])")  # which shards it
        body = [self._statement() for _ in range(draws.number(6, 16))]
        shown = [
            *self._shapes,
            *self._parts,
            "[p.data for p in net.parameters()]",
            "[p.grad for p in net.parameters()]",
        ]
        rows = draws.number(4, 7)
        return Program(
            header=(
                f"data = (torch.arange({STEPS * rows * 4}.) % 23 - 11).view({STEPS * rows}, 4) / 20",
                draws.preamble() + "; data = data.to(torch.get_default_dtype()); import copy, numpy as np",
                "net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))",
                "net.last = nn.Parameter(torch.arange(12.).view(4, 3) / 9)",
                f"optimizer = torch.optim.{draws.pick(OPTIMIZERS).format(p='net.parameters()')}",
                *before,
            ),
            loop=f"for step, x in enumerate(DataLoader(data, batch_size={rows})):",
            body=(*body, *(f"print({name})" for name in shown)),
        )

    def _new(self, shape: Shape, options: tuple[str, ...]) -> str:
        name = f"t{len(self._shapes)}"
        parameter = self._draws.pick([name for name, of in PARAMETERS.items() if of == shape])
        made = self._draws.pick(options).format(n=prod(shape), s=", ".join(map(str, shape)), p=parameter)
        self._shapes[name] = shape
        if ".grad" in made:
            self._uses[name] = f"{parameter}.grad"
        return f"{name} = {made}"

    def _set(self) -> str:
        name = self._draws.pick([*self._shapes])
        options = [parameter for parameter, of in PARAMETERS.items() if of == self._shapes[name]]
        use = self._uses.setdefault(name, self._draws.pick(options) + self._draws.pick([".data", ".grad"]))
        return f"{use} = {name}"

    def _statement(self) -> str:
        draws = self._draws
        parameter = draws.pick([*PARAMETERS])
        alike = [name for name, shape in self._shapes.items() if shape == PARAMETERS[parameter]]
        if not alike or draws.chance(12):
            return self._new(PARAMETERS[parameter], PLAIN + OF_GRADIENT)
        if draws.chance(20):
            return self._set()
        if draws.chance(10):
            self._parts.append(f"v{len(self._parts)}")
            source = draws.pick([*alike, f"{parameter}.data", f"{parameter}.grad", f"{parameter}.detach()"])
            return f"{self._parts[-1]} = {source}{draws.pick(PARTS)}"
        names = {
            "p": parameter,
            "t": draws.pick(alike),
            "u": draws.pick(alike),
            "v": draws.pick([*self._parts, *alike]),
        }
        if draws.chance(40):
            return "with torch.no_grad(): " + draws.pick(WRITES).format(**names)
        if draws.chance(15):
            return draws.pick(MODEL)
        if draws.chance(65):
            return draws.pick(TRAINING).format(**names)
        return "print({t}, {u}, {p}, {p}.grad, {p}.data)".format(**names)
