"""Programs of views, copies and writes: who shares memory with whom, and in which layout."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program

STEPS = 4
MOST = 500  # elements of a tensor
NAMES = "abcdefgh"
SHAPES = [(4, 4), (3, 3), (4,), (2, 3), (3, 4, 2), (2, 2, 2), (1, 4), (4, 1), (1,), (2, 1, 3), (2, 3, 2, 2)]
WARM = (
    *("{0}.contiguous()", "{0}.clone()", "{0}.reshape(-1)", "{0}.flatten(1)", "{0}.view({0}.shape)"),
    *("{0}.mul(2)", "{0}.transpose(0,1)"),
)
# A dimension of size 1 may have any stride: torch's kernels differ.
LAYOUT = "[stride for stride, size in zip({0}.stride(), {0}.shape) if size > 1 and {0}.numel()]"
READS = ("{0}.sum().item()", "{0}.tolist()", "{0}[0].tolist()", "({0} * 1).tolist()", "torch.equal({0}, {0} + 0)")
MIXED = (
    *("{} + {}", "{} * {}", "torch.maximum({}, {})", "torch.where({0} > 0, {0}, {1})", "torch.cat([{}, {}])"),
    *("torch.cat([{}, {}], 1)", "torch.stack([{}, {}])", "torch.stack([{}, {}], 1)", "{0}.expand_as({1})"),
    *("{0}.view_as({1})", "{0}.reshape({1}.shape)", "{0}.type_as({1})", "torch.empty_like({0}).copy_({1})"),
)


class Views:
    """A program being drawn. space: its tensors, as they are in the first step on one device."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.space: dict[str, Any] = {"torch": torch, "F": F, "copy": copy, "step": 0}
        self.tensors: list[str] = ["x"]
        self.body: list[str] = []

    def program(self) -> Program:
        draws = self.draws
        rows = draws.pick([6, 5, 4, 3, 7, 2, 8, 1, 9, 12])
        shape = draws.pick(SHAPES)
        dtype = draws.pick(["float32", "float32", "float32", "int64", "float64", "complex64"])
        less = draws.pick([0, 0, 0, 1, rows - 1]) if rows > 1 else 0  # rows that the last batch lacks
        total = STEPS * rows - less
        size = total * torch.Size(shape).numel()
        data = (
            f"data = (torch.arange({size}) % 23 - 11).to(torch.{dtype}).view({total}, {', '.join(map(str, shape))})"
        )
        if dtype == "complex64":
            data += " * (1 + 2j)"
        exec(data, self.space)
        self.space["x"] = self.space["data"][:rows].clone()
        for _ in range(draws.number(2, 9)):
            self._statement()
        loop = f"for step, x in enumerate(DataLoader(data, batch_size={rows})):"
        return Program(("import copy", data), loop, self._observed())

    def _observed(self) -> tuple[str, ...]:
        parts = []
        for name in self.tensors:
            parts.append(f"print({name!r}, {name}.tolist())")
            facts = f"{name}.shape, {name}.dtype, {LAYOUT.format(name)}, {name}.is_contiguous()"
            parts.append(f"print({name!r}, {facts})")
            if self.draws.chance(15):
                parts.append(f"print({name!r}, {name}.storage_offset())")
            if self.draws.chance(15):
                parts.append(f"print({name!r}, {name}.is_contiguous(memory_format=torch.channels_last))")
        if len(self.tensors) > 1:
            one, other = (self.draws.pick(self.tensors) for _ in range(2))
            parts.append(f"print('memory', {one}.data_ptr() == {other}.data_ptr())")
            parts.append(f"print('same', {one} is {other})")
        return (*self.body, *parts)

    def _statement(self) -> None:
        kinds = ["view", "view", "copy", "copy", "write", "write", "either", "either", "warm", "mix"]
        kind = self.draws.pick([*kinds, "write_through", "write_through", "read", "read", "drop"])
        getattr(self, f"_{kind}")()

    def _tensor(self) -> str:
        return self.draws.pick(self.tensors[::-1])

    def _try(self, expression: str) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = eval(expression, self.space)
        except Exception as error:
            return error
        if not isinstance(value, Tensor) or value.numel() > MOST or value.layout is not torch.strided:
            return TypeError()
        return value

    def _drawn(self, kinds: list[Callable[[Draws, str, Tensor], str]], name: str) -> tuple[str, Any]:
        """An expression of a tensor; one that raises is as good, now and then."""
        for _ in range(8):
            make = self.draws.pick(kinds)
            tensor = self.space[name]
            try:
                expression = make(self.draws, name, tensor)
            except (IndexError, ValueError):  # not for tensors of this shape
                continue
            value = self._try(expression)
            if isinstance(value, Tensor) or (type(value) is not TypeError and self.draws.chance(15)):
                return expression, value
        return name, self.space[name]

    def _assign(self, expression: str, value: Any) -> None:
        free = [name for name in NAMES if name not in self.space]
        name = free[0] if free else self.draws.pick(self.tensors[1:])
        if isinstance(value, Tensor):
            self.space[name] = value
            if name not in self.tensors:
                self.tensors.append(name)
        self.body.append(f"{name} = {expression}")

    def _view(self) -> None:
        self._assign(*self._drawn(VIEWS, self._tensor()))

    def _copy(self) -> None:
        self._assign(*self._drawn(COPIES, self._tensor()))

    def _mix(self) -> None:
        one, other = self._tensor(), self._tensor()
        form = self.draws.pick(MIXED)
        expression = form.format(one, other)
        value = self._try(expression)
        if isinstance(value, Tensor) or self.draws.chance(15):
            self._assign(expression, value)

    def _either(self) -> None:
        """The same shape by another way in every second step."""
        name = self._tensor()
        first, value = self._drawn(VIEWS + COPIES, name)
        if not isinstance(value, Tensor):
            return self._assign(first, value)
        for _ in range(12):
            alike = [one for one in self.tensors if self.space[one].shape == value.shape]
            again = self.draws.pick(alike) if alike else name
            second, other = self._drawn(LAYOUTS + COPIES + VIEWS, again)
            if isinstance(other, Tensor) and other.shape == value.shape and second != first:
                return self._assign(f"{second} if step % 2 else {first}", value)
        return self._assign(first, value)

    def _warm(self) -> None:
        """Call something some times, so that it is recorded."""
        name = self._tensor()
        self.body.append(f"for _ in range(3): {self.draws.pick(WARM).format(name)}")

    def _read(self) -> None:
        """Print a tensor's values before other statements write to it."""
        self.body.append(f"print({self.draws.pick(READS).format(self._tensor())})")

    def _drop(self) -> None:
        """Forget a tensor, so that nothing but others of its memory holds that."""
        if len(self.tensors) > 1:
            name = self.draws.pick(self.tensors[1:])
            self.tensors.remove(name)
            del self.space[name]
            self.body.append(f"del {name}")

    def _write_through(self) -> None:
        """Write through a view without a name, which nothing holds afterwards."""
        view, value = self._drawn(VIEWS, self._tensor())
        if isinstance(value, Tensor):
            self._write_to(view, value)

    def _write(self) -> None:
        name = self._tensor()
        self._write_to(name, self.space[name])

    def _write_to(self, name: str, tensor: Tensor) -> None:
        kept = {one: self.space[one].clone() for one in self.tensors}
        for _ in range(6):
            make, other = self.draws.pick(WRITES), self._tensor()
            try:
                statement = make(self.draws, name, tensor, other)
            except (IndexError, ValueError):
                continue
            if "out=" in statement and tensor.shape != self.space[other].shape:
                continue  # torch would give other memory to a tensor whose memory an array may have
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(statement, self.space)
            except SyntaxError:  # an assignment to a call
                continue
            except Exception:
                if not self.draws.chance(15):
                    continue
            tensors = [self.space[one] for one in self.tensors if self.space[one].numel()]
            sizes = [(one if one.is_complex() else one.double()).abs().max() for one in tensors]
            if any(size > 2**18 for size in sizes):  # sums are to stay exact
                self.space |= kept
                continue
            self.body.append(statement)
            return


def _dim(draws: Draws, tensor: Tensor) -> int:
    most = max(tensor.ndim - 1, 0)
    if draws.chance(4):
        return draws.pick([most + 1, -most - 2, most + 2])
    return draws.number(-most - 1 if tensor.ndim else -1, most)


def _two(draws: Draws, tensor: Tensor) -> tuple[int, int]:
    return _dim(draws, tensor), _dim(draws, tensor)


def _index(draws: Draws, tensor: Tensor) -> str:
    words = []
    for size in tensor.shape[: draws.number(1, max(tensor.ndim, 1))]:
        kind = draws.pick([":", ":", "1:", "::2", "int", ":-1", "None", "a:b", ":1", "2:1"])
        if kind == "int":
            words.append(str(draws.number(-size, max(size - 1, 0))))
        elif kind == "a:b":
            start = draws.number(0, size)
            words.append(f"{start}:{draws.number(start, size)}")
        else:
            words.append(kind)
    if draws.chance(10):
        words = ["...", *words[:1]]
    return ", ".join(words)


def _positions(draws: Draws, tensor: Tensor, dim: int) -> list[int]:
    """Indices of a dimension, of which one may be out of range."""
    size = tensor.shape[dim]
    least, most = (-size, size - 1) if draws.chance(90) else (-size - 1, size)
    return [draws.number(least, most) for _ in range(draws.number(1, 3))]


def _as_strided(draws: Draws, name: str, tensor: Tensor) -> str:
    size = [draws.number(1, 3) for _ in range(draws.number(1, 3))]
    stride = [draws.pick([1, 2, 3, 4, 6, 0]) for _ in size]
    offset = draws.pick(["", "", ", 1"])
    return f"{name}.as_strided({tuple(size)}, {tuple(stride)}{offset})"


def _sizes(draws: Draws, tensor: Tensor) -> str:
    """A shape of as many elements."""
    count, sizes = tensor.numel(), []
    while count > 1 and len(sizes) < 3:
        factor = draws.pick([size for size in range(1, count + 1) if count % size == 0])
        sizes.append(factor)
        count //= factor
    sizes.append(count)
    if draws.chance(60):
        sizes = [tensor.shape[0], -1] if tensor.ndim and draws.chance(60) else sizes
        if -1 not in sizes:
            sizes[draws.number(0, len(sizes) - 1)] = -1
    return ", ".join(map(str, sizes))


def _permutation(draws: Draws, tensor: Tensor) -> str:
    return ", ".join(map(str, draws.shuffled(range(tensor.ndim))))


def _expanded(draws: Draws, name: str, tensor: Tensor) -> str:
    sizes = [draws.pick([2, 3, -1]) if size == 1 else draws.pick([size, -1]) for size in tensor.shape]
    extra = [draws.number(1, 3)] if draws.chance(25) else []
    if draws.chance(5):
        sizes[0] = sizes[0] + 1
    return f"{name}.expand({', '.join(map(str, extra + sizes))})"


def _unsqueezed_and_expanded(draws: Draws, name: str, tensor: Tensor) -> str:
    place = draws.number(0, tensor.ndim)
    sizes = [*tensor.shape]
    sizes.insert(place, 2)
    return f"{name}.unsqueeze({place}).expand({', '.join(map(str, sizes))})"


def _part(draws: Draws, name: str, tensor: Tensor, form: str) -> str:
    return f"{name}.{form.format(draws.number(1, 3), _dim(draws, tensor))}[{draws.pick([0, -1, 1])}]"


VIEWS: list[Callable[[Draws, str, Tensor], str]] = [
    lambda d, n, t: f"{n}.transpose{_two(d, t)}",
    lambda d, n, t: f"{n}.transpose{_two(d, t)}",
    lambda d, n, t: f"{n}.permute({_permutation(d, t)})",
    lambda d, n, t: f"{n}.movedim{_two(d, t)}",
    lambda d, n, t: f"{n}.mT",
    lambda d, n, t: f"{n}.t()",
    lambda d, n, t: f"{n}[{_index(d, t)}]",
    lambda d, n, t: f"{n}[{_index(d, t)}]",
    lambda d, n, t: f"{n}[{_index(d, t)}]",
    lambda d, n, t: f"{n}[0]",
    lambda d, n, t: f"{n}.narrow({_dim(d, t)}, {d.number(0, 1)}, {d.number(0, 3)})",
    lambda d, n, t: f"{n}.select({_dim(d, t)}, {d.number(-1, 1)})",
    lambda d, n, t: f"{n}.unsqueeze({_dim(d, t)})",
    lambda d, n, t: f"{n}.squeeze()",
    lambda d, n, t: f"{n}.squeeze({_dim(d, t)})",
    lambda d, n, t: f"{n}.flatten{_two(d, t)}",
    lambda d, n, t: f"{n}.flatten(1)",
    lambda d, n, t: f"{n}.flatten()",
    lambda d, n, t: f"{n}.ravel()",
    lambda d, n, t: f"{n}.unflatten({_dim(d, t)}, ({d.number(1, 2)}, -1))",
    lambda d, n, t: f"{n}.view({_sizes(d, t)})",
    lambda d, n, t: f"{n}.view({_sizes(d, t)})",
    lambda d, n, t: f"{n}.view({n}.shape)",
    lambda d, n, t: f"{n}.view(-1)",
    lambda d, n, t: f"{n}.view({n}.shape[0], -1)",
    lambda d, n, t: f"{n}.reshape({_sizes(d, t)})",
    lambda d, n, t: f"{n}.reshape({n}.shape[0], -1)",
    lambda d, n, t: f"{n}.view(torch.int32)",
    lambda d, n, t: _expanded(d, n, t),
    lambda d, n, t: _unsqueezed_and_expanded(d, n, t),
    lambda d, n, t: _part(d, n, t, "chunk({}, {})"),
    lambda d, n, t: _part(d, n, t, "split({}, {})"),
    lambda d, n, t: _part(d, n, t, "tensor_split({}, {})"),
    lambda d, n, t: f"{n}.unbind({_dim(d, t)})[{d.pick([0, -1])}]",
    lambda d, n, t: f"{n}.diagonal({d.number(-1, 1)}, {_dim(d, t)}, {_dim(d, t)})",
    lambda d, n, t: f"{n}.unfold({_dim(d, t)}, {d.number(1, 3)}, {d.number(1, 2)})",
    lambda d, n, t: f"{n}.detach()",
    lambda d, n, t: f"{n}.data",
    lambda d, n, t: _as_strided(d, n, t),
    lambda d, n, t: f"{n}.view_as({n})",
    lambda d, n, t: f"{n}.real",
    lambda d, n, t: f"{n}.imag",
    lambda d, n, t: f"{n}.conj()",
    lambda d, n, t: f"{n}.mH",
    lambda d, n, t: f"torch.view_as_real({n})",
    lambda d, n, t: f"{n}.view(torch.int64)",
    lambda d, n, t: f"torch.from_numpy({n}.view(torch.int32).numpy())",
    lambda d, n, t: f"torch.atleast_3d({n})",
    lambda d, n, t: f"torch.broadcast_to({n}, (2, *{n}.shape))",
    lambda d, n, t: f"{n}.swapaxes{_two(d, t)}",
    lambda d, n, t: f"list({n})[{d.pick([0, -1])}]",
]

LAYOUTS: list[Callable[[Draws, str, Tensor], str]] = [  # of the same shape
    lambda d, n, t: f"{n}.contiguous()",
    lambda d, n, t: f"{n}.clone()",
    lambda d, n, t: f"{n} + 0",
    lambda d, n, t: n,
    lambda d, n, t: "{0}.transpose({1}, {2}).contiguous().transpose({1}, {2})".format(n, *_two(d, t)),
    lambda d, n, t: "{0}.transpose({1}, {2}).clone().transpose({1}, {2})".format(n, *_two(d, t)),
    lambda d, n, t: f"{n}.flip({_dim(d, t)})",
    lambda d, n, t: f"{n}.clone(memory_format=torch.contiguous_format)",
    lambda d, n, t: f"{n}.contiguous(memory_format=torch.channels_last)",
    lambda d, n, t: f"{n}.transpose{_two(d, t)}",
    lambda d, n, t: f"{n}.mT",
    lambda d, n, t: f"torch.stack([{n}, {n}], -1)[..., 0]",
    lambda d, n, t: f"torch.cat([{n}, {n}], {_dim(d, t)}).narrow(0, 0, {t.shape[0]})",
]

COPIES: list[Callable[[Draws, str, Tensor], str]] = [
    *LAYOUTS,
    lambda d, n, t: f"{n}.contiguous()",
    lambda d, n, t: f"{n}.transpose{_two(d, t)}.contiguous()",
    lambda d, n, t: f"{n}.clone(memory_format=torch.preserve_format)",
    lambda d, n, t: f"-{n}",
    lambda d, n, t: f"+{n}",
    lambda d, n, t: f"{n} * 1",
    lambda d, n, t: f"{n}.roll(1, {_dim(d, t)})",
    lambda d, n, t: f"{n}.sort({_dim(d, t)}).values",
    lambda d, n, t: f"{n}.sort({_dim(d, t)}, stable=True).indices",
    lambda d, n, t: f"{n}[{n} > 0]",
    lambda d, n, t: f"{n}[[0, -1]]",
    lambda d, n, t: f"{n}[:, [0, -1]]",
    lambda d, n, t: f"{n}[torch.arange({n}.shape[0]) % 2 == 0]",
    lambda d, n, t: f"{n}.flatten(1).sum(1) > 0",
    lambda d, n, t: f"{n}[{n}.flatten(1).sum(1) > 0]",
    lambda d, n, t: f"{n}.index_select({_dim(d, t)}, torch.tensor([0, 0]))",
    lambda d, n, t: f"{n}.to({n}.dtype)",
    lambda d, n, t: f"{n}.float()",
    lambda d, n, t: f"{n}.to(torch.float64)",
    lambda d, n, t: f"{n}.to({n}.dtype, copy=True)",
    lambda d, n, t: f"{n}.cpu()",
    lambda d, n, t: f"{n}.to('cpu')",
    lambda d, n, t: f"torch.zeros_like({n}) + {n}",
    lambda d, n, t: f"torch.zeros_like({n})",
    lambda d, n, t: f"torch.ones_like({n}, memory_format=torch.contiguous_format)",
    lambda d, n, t: f"{n}.new_zeros({n}.shape)",
    lambda d, n, t: f"{n}.repeat({', '.join(['1'] * (t.ndim - 1) + ['2'])})",
    lambda d, n, t: f"{n}.repeat_interleave(2, {_dim(d, t)})",
    lambda d, n, t: f"{n}.cumsum({_dim(d, t)})",
    lambda d, n, t: f"{n}.clamp(min=0)",
    lambda d, n, t: f"F.relu({n})",
    lambda d, n, t: f"{n}.masked_fill({n} > 0, 1)",
    lambda d, n, t: f"{n}.tril()",
    lambda d, n, t: f"F.pad({n}, (1, 0))",
    lambda d, n, t: f"{n}.sum({_dim(d, t)})",
    lambda d, n, t: f"{n}.amax({_dim(d, t)}, keepdim=True)",
    lambda d, n, t: f"{n}.abs().sum()",
    lambda d, n, t: f"{n}.nan_to_num()",
    lambda d, n, t: f"F.dropout({n}, 0.5, training=False)",
    lambda d, n, t: f"{n}.to(memory_format=torch.channels_last)",
    lambda d, n, t: f"{n}.gather({_dim(d, t)}, ({n} > 0).long())",
    lambda d, n, t: f"{n}.reshape({_sizes(d, t)})",
    lambda d, n, t: f"{n}.flatten{_two(d, t)}",
    lambda d, n, t: f"{n}.resolve_conj()",
    lambda d, n, t: f"{n}.conj().resolve_conj()",
    lambda d, n, t: f"{n}.resolve_neg()",
    lambda d, n, t: f"copy.deepcopy({n})",
    lambda d, n, t: f"copy.deepcopy([x, {n}])[1]",
    lambda d, n, t: f"torch.from_numpy({n}.numpy())",
    lambda d, n, t: f"torch.tensor({n}.tolist(), dtype={n}.dtype)",
    lambda d, n, t: f"torch.as_tensor({n})",
]

WRITES: list[Callable[[Draws, str, Tensor, str], str]] = [
    lambda d, n, t, o: f"{n}.mul_({d.pick([2, 3, -1])})",
    lambda d, n, t, o: f"{n}.add_({d.pick([1, 5])})",
    lambda d, n, t, o: f"{n} += {d.pick([1, 7])}",
    lambda d, n, t, o: f"{n}.zero_()",
    lambda d, n, t, o: f"{n}[{_index(d, t)}] = {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}[{_index(d, t)}] = {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}[{_index(d, t)}] += {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}[{_index(d, t)}] *= 2",
    lambda d, n, t, o: f"{n}[{_index(d, t)}].mul_(2)",
    lambda d, n, t, o: f"{n}[{n} > 0] = {d.number(-9, -1)}",
    lambda d, n, t, o: f"{n}.flatten(1).add_(2)",
    lambda d, n, t, o: f"{n}.reshape(-1)[{d.number(0, 2)}] = {d.number(20, 30)}",
    lambda d, n, t, o: f"{n}.transpose{_two(d, t)}.add_(3)",
    lambda d, n, t, o: f"{n}.copy_({o})",
    lambda d, n, t, o: f"{n}.copy_({n}.flip(0))",
    lambda d, n, t, o: f"{n} += {o}",
    lambda d, n, t, o: f"{n}.add_({o}, alpha=2)",
    lambda d, n, t, o: f"{n}.masked_fill_({n} < 0, 4)",
    lambda d, n, t, o: f"{n}.data.add_(1)",
    lambda d, n, t, o: f"{n}.detach().sub_(1)",
    lambda d, n, t, o: f"{n}.transpose_{_two(d, t)}",
    lambda d, n, t, o: f"{n}.unsqueeze_({_dim(d, t)})",
    lambda d, n, t, o: f"{n}.squeeze_({_dim(d, t)})",
    lambda d, n, t, o: f"{n}.clamp_(min=-3)",
    lambda d, n, t, o: f"{n}.fill_({d.number(1, 9)})",
    lambda d, n, t, o: f"{n}.index_fill_({_dim(d, t)}, torch.tensor([0]), 6)",
    lambda d, n, t, o: f"torch.add({n}, 1, out={o})",
    lambda d, n, t, o: f"for row in {n}: row += 1",
    lambda d, n, t, o: f"{n}.contiguous().add_(9)",
    lambda d, n, t, o: f"{n}.reshape({_sizes(d, t)}).add_(4)",
    lambda d, n, t, o: f"F.relu({n}, inplace=True)",
    lambda d, n, t, o: f"{n}.diagonal().add_(1)",
    lambda d, n, t, o: f"{n}.numpy()[...] += 1",
    lambda d, n, t, o: f"{n}.view(torch.int32).numpy()[...] ^= -(2**31)",  # the signs
    lambda d, n, t, o: f"{n}.untyped_storage().fill_(0)",
    lambda d, n, t, o: f"{n}[{_positions(d, t, 0)}] = {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}[:, {_positions(d, t, 1)}] = {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}[:, torch.tensor({_positions(d, t, 1)})] = {d.number(1, 9)}",
    lambda d, n, t, o: f"{n}.index_fill_({d.pick([0, 1])}, torch.tensor({_positions(d, t, 1)}), 5)",
    lambda d, n, t, o: f"{n}.scatter_({_dim(d, t)}, ({n} > 0).long() * {d.number(0, 3)}, {d.number(1, 9)})",
    lambda d, n, t, o: f"{n}.put_(torch.tensor({_positions(d, t, 0)}), torch.tensor({d.number(1, 9)}).to({n}))",
    lambda d, n, t, o: f"torch._foreach_add_([{n}, {o}, {n}], 1)",
    lambda d, n, t, o: f"torch._foreach_mul_([{n}, {n}[0]], 2)",
    lambda d, n, t, o: f"{n}.expand(2, *{n}.shape)[0].add_(1)",
]
