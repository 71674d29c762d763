"""Which parameters of a model are gathered together: the blocks into which it is divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LARGE = 4  # parameters in no part form a block each if larger than this part of the largest block


def groups(module: nn.Module, parts: list[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each block: those of each of `parts`, each large one of the others, and the rest."""
    if any(map(is_lazy, module.parameters())) or any(
        isinstance(part, torch.jit.ScriptModule) for part in module.modules()
    ):
        return
    sparse = (part for part in module.modules() if getattr(part, "sparse", False) is True)
    seen = {id(parameter) for part in sparse for parameter in part.parameters()}
    sizes = [0]
    for part in parts:
        parameters = [parameter for parameter in part.parameters() if id(parameter) not in seen]
        seen.update(map(id, parameters))
        sizes.append(sum(parameter.numel() for parameter in parameters))
        yield parameters
    rest = []
    for parameter in module.parameters():
        if id(parameter) in seen:
            continue
        if parameter.numel() * _LARGE > max(sizes) > 0:
            yield [parameter]
        else:
            rest.append(parameter)
    yield rest


def divide(module: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the parts of a model whose parameters are gathered together.

    They are the outermost parts of the classes in `names`; without names, the entries of the model's lists
    (ModuleList, ModuleDict, Sequential, and such within these). Parts without parameters, and those used elsewhere,
    too, are left out.
    """
    users = Counter(_parameters(module))
    registered = Counter(part for _, part in module.named_modules(remove_duplicate=False))

    def stands_alone(entry: nn.Module) -> bool:
        parameters = Counter(_parameters(entry))
        once = all(registered[part] == 1 for part in entry.modules())
        return bool(parameters) and once and all(users[key] == count for key, count in parameters.items())

    return [entry for entry in (_named(module, names) if names else _entries(module)) if stands_alone(entry)]


def _named(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the outermost submodules whose class name is in `names`."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _named(child, names)


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists."""
    for child in module.children():
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _entries(child)


def _parameters(module: nn.Module) -> Iterator[int]:
    """Yield the id of each parameter of each part; tied ones several times."""
    return (id(parameter) for part in module.modules() for parameter in nn.Module.parameters(part, recurse=False))
