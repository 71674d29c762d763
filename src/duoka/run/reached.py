"""What is seen at the end of each backward pass, of the models that it reached.

DistributedDataParallel has to be told beforehand which parameters a pass leaves out; here they are named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from duoka.errors import OptionError, Refused
from duoka.view.collectives import Collectives
from duoka.view.site import user_line

Reached = Callable[[Tensor], bool]


@dataclass(frozen=True, slots=True)
class DdpOptions:
    """DistributedDataParallel's options of these names.

    find_unused_parameters: True: parameters that a pass leaves out are nobody's business; False: they are an error;
    None: they are told, once. static_graph: every pass reaches the same. broadcast_buffers: all ranks have rank 0's
    buffers after each pass; None: where ranks may compute different ones. gradient_as_bucket_view: gradients are
    parts of larger tensors, which spares a copy.
    """

    find_unused_parameters: bool | None = None
    static_graph: bool = False
    broadcast_buffers: bool | None = None
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        for name in self.__slots__:
            given = getattr(self, name)
            if not isinstance(given, bool) and given is not None:
                raise OptionError(name, given, "True or False")


@dataclass(slots=True)
class _Looking:
    """What is looked for in one model. passes: how many reached it. first: what the first one reached."""

    options: DdpOptions
    passes: int = 0
    first: frozenset[str] = frozenset()
    told: bool = False


class Passes:
    """Observes the backward passes of a run (`Strategy.observe`). local_norm: BatchNorm is each share's."""

    def __init__(self, ranks: Collectives, local_norm: bool, say: Callable[[str], None]) -> None:
        self._ranks, self._local_norm, self._say = ranks, local_norm, say
        self._models: WeakKeyDictionary[nn.Module, _Looking] = WeakKeyDictionary()

    def look_at(self, module: nn.Module, options: DdpOptions) -> None:
        """Look at the passes that reach `module` from now on."""
        self._models[module] = _Looking(options)

    def __call__(self, reached: Reached) -> None:
        """A pass is over, on every rank.

        Raises:
            Refused: it left out what it should not.
        """
        for module, looking in list(self._models.items()):
            if not any(map(reached, module.parameters())):
                continue
            looking.passes += 1
            self._see_parameters(module, looking, reached)
            asked = looking.options.broadcast_buffers
            if asked or (asked is None and self._local_norm):
                self._give_buffers(list(module.buffers()))

    def _see_parameters(self, module: nn.Module, looking: _Looking, reached: Reached) -> None:
        options, find_unused = looking.options, looking.options.find_unused_parameters
        often = options.static_graph or find_unused is False
        if not often and (find_unused or looking.told or looking.passes & (looking.passes - 1)):
            return
        wanted = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        found = frozenset(name for name, parameter in module.named_parameters() if reached(parameter))
        looking.first = looking.first or found
        if options.static_graph and looking.first != found:
            names = _owners(module, set(looking.first ^ found))
            raise Refused(
                f"the backward pass at {user_line()} reached other parameters of {type(module).__name__} than the "
                f"first one, with static_graph=True: {names}"
            )
        if find_unused or looking.told or wanted <= found:
            return
        text = f"{type(module).__name__}: no gradient at {user_line()} for {_owners(module, wanted - found)}"
        if find_unused is False:
            raise Refused(f"{text}; find_unused_parameters=False says that there is no such")
        looking.told = True
        self._say(f"{text} (find_unused_parameters=True if so meant)")

    def _give_buffers(self, buffers: list[Tensor]) -> None:
        """Rank 0's, in one transfer for each type."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = self._ranks.broadcast(torch.cat([buffer.detach().flatten() for buffer in alike]), 0)
            with torch.no_grad():
                for buffer, part in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
                    buffer.copy_(part.view_as(buffer))


def _owners(module: nn.Module, names: set[str]) -> str:
    """Parameters by the module that owns them: `head (Linear): weight, bias; norm (LayerNorm): bias`."""
    listed = [name.rpartition(".") for name, _ in module.named_parameters() if name in names]
    groups = [(owner, [own for *_, own in each]) for owner, each in groupby(listed, key=lambda parts: parts[0])]
    return "; ".join(f"{_named(module, owner)}: {', '.join(own)}" for owner, own in groups)


def _named(module: nn.Module, owner: str) -> str:
    kind: Any = type(module.get_submodule(owner))
    return f"{owner} ({kind.__name__})" if owner else kind.__name__
