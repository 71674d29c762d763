"""Optimizers: keep their parameters in step, and sets of parameters in one order.

By default a tensor's hash is its address, so the order of a set differs between processes. Some libraries make an
optimizer for each parameter of a set, and duoka broadcasts the parameters of each in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.view.originals import unnumbered
from duoka.view.tensor.batch import BatchTensor


class _Registered:
    """Numbers parameters in the order of their registration in modules, which is the same on every rank."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._next = count()

    def add(self, module: nn.Module, name: str, parameter: Tensor | None) -> None:
        """Number a parameter that is registered; the arguments are those of torch's hook."""
        if parameter is not None and parameter not in self._numbers:
            self._numbers[parameter] = next(self._next)

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self._numbers

    def in_order(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return registered tensors in the order of registration, then the others in the given order."""
        listed = list(tensors)
        known = [tensor for tensor in listed if self.knows(tensor)]
        known.sort(key=self._numbers.__getitem__)
        return known + [tensor for tensor in listed if not self.knows(tensor)]


def install(session: Session) -> None:
    """Intercept `Optimizer.load_state_dict`; `add_param_group`, which is called for all parameters; and sets of them.

    A set's order, and that of a list made of one, follows addresses, which differ between processes: ranks that took
    parameters of one shape in such an order would average the gradient of one with that of another.
    """
    registered = _Registered()
    with unnumbered():
        session.patches.at_end(register_module_parameter_registration_hook(registered.add).remove)

    @session.patches.around(Optimizer, "load_state_dict")
    def load_state_dict(original: Callable[..., Any], self: Optimizer, state_dict: dict[str, Any]) -> Any:
        return original(self, session.strategy.own_state(self, state_dict))

    @session.patches.around(Optimizer, "add_param_group")
    def add_param_group(original: Callable[..., None], self: Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        with session.ranks.coalesced_broadcasts():
            for parameter in registered.in_order(self.param_groups[-1]["params"]):
                if not isinstance(parameter, BatchTensor):  # a batch's gradient belongs to its own rows
                    session.strategy.optimize(parameter)

    @session.patches.around(Optimizer, "__init__")
    def init(original: Callable[..., None], self: Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(params, (set, frozenset)):
            others = sum(not registered.knows(tensor) for tensor in params)
            if others > 1 and session.ranks.world_size > 1:
                raise Refused(
                    f"{type(self).__name__} was given a set with {others} tensors that no module has registered: "
                    "the order of a set differs in each process; give it a list"
                )
            params = registered.in_order(params)
        original(self, params, defaults)
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        if any(map(registered.knows, parameters)):
            session.strategy.check_optimizer(self)


def number_tensors(session: Session) -> None:
    """Let a tensor's hash be the number of tensors hashed before it, where all ranks run the same code.

    This stays when the run ends, and in forked processes, which inherit sets and dictionaries of tensors.
    """
    known: dict[int, tuple[int, ref[Tensor]]] = getattr(Tensor.__hash__, "known", {})  # by identity
    numbers = count()

    def number(tensor: Tensor) -> int:
        try:
            return known[id(tensor)][0]
        except KeyError:
            key = id(tensor)
            known[key] = next(numbers) if session.caller.may_communicate() else key, ref(tensor, _forget(known, key))
            return known[key][0]

    number.known = known  # type: ignore[attr-defined]
    Tensor.__hash__ = number  # type: ignore[method-assign]


def _forget(known: dict[int, Any], key: int) -> Any:
    return lambda _: known.pop(key, None)
