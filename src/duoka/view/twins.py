"""Models that no rank can run alone, as their parameters are sharded, are looked at by a twin.

A twin is a whole copy on the CPU of the rank that looks. Before each look it gets the model's weights, buffers, modes
and plain attributes as they are then; that is the one thing for which the ranks meet.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from duoka.errors import OptionError, Refused
from duoka.private.texts import MIXED as _MIXED
from duoka.view.call import Call
from duoka.view.collectives import Collectives
from duoka.view.parts import is_sharded
from duoka.view.site import user_line

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Twin:
    """whole: the copy, on the rank that looks. made_of: what the model was made of, to see whether it still is."""

    whole: nn.Module | None
    made_of: list[str]


class Twins:
    """The twins of one run's sharded models. Every call is made by all ranks, in the same order."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks, self._looks = ranks, ranks.rank == ranks.world_size - 1
        self._twins: WeakKeyDictionary[nn.Module, _Twin] = WeakKeyDictionary()
        self._models: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = WeakKeyDictionary()  # of each part

    def copied(self, module: nn.Module) -> nn.Module | None:
        """A copy of a model that is about to be sharded, on the rank that looks.

        Raises:
            OptionError: it cannot be copied; on every rank.
        """
        whole, failed = None, ""
        if self._looks:
            try:
                whole = copy.deepcopy(module).to(_CPU)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
        if failed := self._ranks.broadcast_object(failed, self._ranks.world_size - 1):
            name = type(module).__name__
            raise OptionError("strategy", "fsdp", f"used for a model that can be copied, and {name} cannot", failed)
        return whole

    def add(self, module: nn.Module, whole: nn.Module | None) -> None:
        """From now on `module`, which is sharded, is looked at by its copy."""
        self._twins[module] = _Twin(whole, _made_of(module))
        model = ref(module)
        for part in module.modules():
            self._models[part] = model

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._twins

    def is_part(self, module: nn.Module) -> bool:
        """Whether it belongs to a sharded model, and is not that model."""
        return module in self._models and module not in self._twins

    def check(self, module: nn.Module) -> None:
        """See that a sharded model, which is not being called, is still what it was: torch knows of no other parts.

        Raises:
            Refused: it has other parts or parameters.
        """
        if module in self._twins and _made_of(module) != self._twins[module].made_of:
            raise Refused(
                f"{user_line()} finds that parts of {type(module).__name__} were changed after run.model(..., "
                "strategy='fsdp'); change them before"
            )

    @staticmethod
    def in_other_words(error: Exception) -> Exception:
        """What is raised in place of an error in a call of a sharded model."""
        if not isinstance(error, RuntimeError) or _MIXED not in str(error):
            return error
        return Refused(
            f"the model at {user_line()} uses a parameter that is in parts: those of an entry of a list come "
            "together in calls of the entry itself, not of its methods or parts; with strategy='fsdp', call the entry"
        )

    def stand_in(self, call: Call) -> Call:
        """A call of a sharded model, or of a part of one, as it is to be looked at; any other call as it is."""
        model = self._models[call.module]() if call.module in self._models else None
        if model is None:
            return call
        twin = self._twins[model]
        part = next(name for name, part in model.named_modules() if part is call.module)
        whole = None if twin.whole is None else twin.whole.get_submodule(part)
        self._ranks.come_to(f"look({type(call.module).__name__})")
        for name, parameter in call.module.named_parameters():
            value = _gathered(parameter)
            if whole is not None:
                own = whole.get_parameter(name)
                own.data.copy_(value)
                own.requires_grad_(parameter.requires_grad)
        self._ranks.leave()
        if whole is None:
            return call
        for one, other in zip(call.module.modules(), whole.modules(), strict=True):
            _bring_up_to_date(other, one)
        return call.elsewhere(whole, _CPU)


@torch.no_grad()
def _gathered(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if is_sharded(parameter) else parameter
    return whole


def _made_of(module: nn.Module) -> list[str]:
    parts = [f"{name} {type(part).__qualname__}" for name, part in module.named_modules(remove_duplicate=False)]
    own = {id(parameter): name for name, parameter in module.named_parameters()}  # which are one
    return parts + [
        f"{name} {own[id(parameter)]} {tuple(parameter.shape)} {is_sharded(parameter)}"
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _bring_up_to_date(twin: nn.Module, part: nn.Module) -> None:
    """Give a part of a twin what may have changed, but for the parameters."""
    twin.__dict__.update({name: value for name, value in part.__dict__.items() if isinstance(value, _PLAIN)})
    for name, buffer in part._buffers.items():
        twin._buffers[name] = None if buffer is None else buffer.detach().to(_CPU, copy=True)
