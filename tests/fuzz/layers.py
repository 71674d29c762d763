"""Programs that train one of torch's modules with torch's own samples (`module_db`), and change it between steps."""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program
from tests.fuzz.samples import as_batch, is_dense, moved, numbers, seeded

TRAINING = (
    *("optimizer.step(); optimizer.zero_grad()", "net.zero_grad(set_to_none=step % 2 == 0)"),
    *("net.train(step % 2 == 0)", "net.requires_grad_(step != 1)", "net.eval()"),
    *("net.load_state_dict(net.state_dict())", "net = layer.module = copy.deepcopy(net)"),
    *(
        "with torch.no_grad(): [p.mul_(0.9) for p in net.parameters()]",
        "with torch.no_grad(): layer.inputs[0].mul_(2)",
    ),
    *("nn.utils.clip_grad_norm_(net.parameters(), 0.5)", "results[0].mul_(2)", "results[0][0] = 0"),
    *("results = layer.call(step + 3)", "print(layer.gradients())", "torch.nn.utils.clip_grad_value_(weights, 0.1)"),
    *("[p.data.add_(0.01) for p in net.parameters()]", "[b.zero_() for b in net.buffers()]"),
)


@cache
def _modules() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    return {info.name: info for info in module_db}


@cache
def samples_of(name: str, training: bool) -> list[Any]:
    """Return torch's inputs of a module that have rows: the same in every process."""
    info, arguments = _modules()[name], {"device": "cpu", "dtype": torch.float64, "requires_grad": False}
    with seeded():
        given = info.module_inputs_func(info, training=training, **arguments)
    calls = [one for one in given if one.forward_input is not None]
    return [one for one in calls if any(is_dense(leaf) and leaf.dim() for leaf in _leaves(one)) and not _is_long(one)]


def _is_long(sample: Any) -> bool:
    """Return whether each weight's gradient is a sum of a thousand terms, which rounds by more than nudges show."""
    return any(is_dense(leaf) and not leaf.is_floating_point() and leaf.numel() > 1000 for leaf in _leaves(sample))


def _leaves(sample: Any) -> list[Any]:
    return tree_leaves((sample.forward_input.args, sample.forward_input.kwargs))


class Layer:
    """A module, called with inputs of which those with as many rows as the first are batches, along `dim`."""

    def __init__(self, name: str, training: bool, number: int, dim: int, units: Tensor) -> None:
        kind, sample = _modules()[name].module_cls, samples_of(name, training)[number]
        options = dict(sample.constructor_input.kwargs)
        if "dtype" in inspect.signature(kind).parameters:
            options |= {"dtype": torch.float64, "device": "cpu"}
        self.module = kind(*sample.constructor_input.args, **options).double().train(training)
        self._given = sample.forward_input.args, sample.forward_input.kwargs
        first = next(leaf for leaf in _leaves(sample) if is_dense(leaf) and leaf.dim())
        self._dim, self._units = min(dim, first.dim() - 1), units
        self._rows = first.shape[self._dim]
        self.inputs: list[Tensor] = []  # of the last call, those that are batches

    def call(self, step: int) -> list[Tensor]:
        """Return the tensors that the module returns for its inputs, which shrink from step to step."""
        self.inputs = []

        def prepared(leaf: Any) -> Any:
            if not is_dense(leaf):
                return leaf
            value = moved(leaf, self._units)
            if leaf.is_floating_point() and not isinstance(self.module, torch.nn.modules.loss._Loss):
                value *= 1 - 0.1 * step
            if leaf.dim() <= self._dim or leaf.shape[self._dim] != self._rows or not self._rows:
                return value
            batch = as_batch(value, self._dim)
            self.inputs.append(batch.requires_grad_(batch.is_floating_point() and not self.inputs))
            return batch * 1 if batch.requires_grad else batch

        torch.manual_seed(step)
        args, kwargs = tree_map(prepared, self._given)
        return [leaf for leaf in tree_leaves(self.module(*args, **kwargs)) if isinstance(leaf, Tensor)]

    def state(self) -> Any:
        """Return parameters and buffers."""
        return {name: numbers(entry) for name, entry in self.module.state_dict().items() if is_dense(entry)}

    def gradients(self) -> Any:
        """Return the gradients of the inputs and of the parameters."""
        of = [tensor.grad for tensor in (*self.inputs, *self.module.parameters()) if tensor.is_floating_point()]
        return [None if gradient is None else numbers(gradient) for gradient in of]


def seen(results: list[Tensor]) -> Any:
    """Return shapes, strides, flags and numbers."""
    flags = [(tuple(each.shape), each.requires_grad, each.is_leaf, each._version) for each in results]
    return flags, [numbers(each) for each in results]


def layers(draws: Draws) -> Program:
    """Return a program of some steps."""
    name, training = draws.pick([*_modules()]), draws.chance(70)
    if not samples_of(name, training):
        return layers(draws)
    number = draws.number(0, len(samples_of(name, training)) - 1)
    header = (
        "import copy",
        "from tests.fuzz.layers import Layer, seen",
        "torch.manual_seed(0); units = torch.ones(4096, dtype=torch.float64)",
        f"layer = Layer({name!r}, {training}, {number}, {draws.pick([0, 0, 1])}, units); net = layer.module",
        "weights = [*net.parameters()] or [nn.Parameter(torch.ones(1))]",
        f"optimizer = torch.optim.{draws.pick(['SGD(weights, 0.01, momentum=0.9)', 'Adam(weights, 0.01)'])}",
    )
    body = ["results = layer.call(step)", "print(seen(results))"]
    body += ["sum((each * each).sum().abs() for each in results if each.requires_grad).backward()"]
    draws.insert(body, TRAINING, draws.number(1, 4))
    return Program(header, "for step in range(3):", (*body, "print(layer.gradients())", "print(layer.state())"))
