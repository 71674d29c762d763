"""`run.model`: move a model to this rank's device and keep its parameters in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from duoka.collectives.base import Collectives
from duoka.errors import OptionError
from duoka.hardware.accelerator import memory_of
from duoka.plain.session import Session
from duoka.plain.transforms import run_uncompiled
from duoka.private.torch import is_dtensor
from duoka.run.agreement import check_same, gather_objects
from duoka.view.modules.compiled import is_compiled

ROOM = 0.9  # fraction of a device's memory that is used: the rest is for libraries and fragmentation
NOT_OPTIONS = {  # of `run.model`, but of DistributedDataParallel or other libraries -> why
    "bucket_cap_mb": "gradients travel in buckets of 25 MB",
    "device_ids": "a rank has one device, which duoka.start(device=...) chooses",
    "process_group": "all ranks of the run keep the model in step",
    "precision": "compute under torch.autocast, and with float16 scale the loss by torch.amp.GradScaler",
    "mixed_precision": "compute under torch.autocast, and with float16 scale the loss by torch.amp.GradScaler",
    "compile": "call model.compile()",
}


def prepare(module: nn.Module, strategy: str, machine: str, session: Session, device: torch.device) -> None:
    """Move `module` to `device`, in place, shard it if the strategy does, and keep its parameters in step.

    machine: of this rank.

    Raises:
        OptionError: it cannot be kept in step, or not by this strategy.
        RanksApart: it differs between ranks; raised on every rank.
    """
    _check(module)
    check_same(_layout(module), session.ranks, _difference)
    machines = ranks_by_machine(machine, session.ranks) if strategy == "hsdp" else []
    if strategy in ("fsdp", "hsdp") and (not machines or len(machines[0]) > 1):  # one rank holds the model whole
        shard(module, session, device, machines)
    else:
        move(module, device)
    session.calls.synchronize(module)


def move(module: nn.Module, device: torch.device) -> None:
    """Move `module` to `device`. Raises OptionError if its parameters would become other objects."""
    before = list(module.parameters())
    module.to(device)
    if any(old is not new for old, new in zip(before, module.parameters(), strict=True)):
        hint = "else an optimizer that was made before has the old ones: move it to its device first"
        name = type(module).__name__
        raise OptionError("run.model", name, "given a module whose parameters stay the same when it is moved", hint)


def ranks_by_machine(machine: str, ranks: Collectives) -> list[list[int]]:
    """Return the ranks of each machine, that of rank 0 first; empty if all are on one. machine: of this rank.

    Raises OptionError if they have different numbers of ranks.
    """
    machines: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_objects(machine, ranks)):
        machines.setdefault(name, []).append(rank)
    counts = [len(members) for members in machines.values()]
    if len(set(counts)) > 1:
        hint = f"they have {', '.join(map(str, counts))}"
        raise OptionError("strategy", "hsdp", "fsdp on machines with different numbers of ranks", hint)
    return list(machines.values()) if len(machines) > 1 else []


def chosen_strategy(module: nn.Module, machine: str, session: Session, device: torch.device) -> str:
    """Return the strategy for `strategy="auto"`, the same on every rank: the first of ddp, hsdp, fsdp that may fit.

    That is, if parameters, gradients and Adam's state fit into the smallest device. machine, device: of this rank.
    """
    _check(module)
    ranks = session.ranks
    if ranks.world_size == 1 or session.view.shares.exact or session.settings.compress != "none":
        return "ddp"
    memories = gather_objects((machine, memory_of(device)), ranks)
    here = Counter(name for name, _ in memories)
    room = ROOM * min(size / (here[name] if device.type == "cpu" else 1) for name, size in memories)
    sizes = [(parameter.numel() * parameter.itemsize, parameter.requires_grad) for parameter in module.parameters()]
    frozen, trained = (sum(size for size, trains in sizes if trains is wanted) for wanted in (False, True))
    need = frozen + 5 * trained  # gradients are copied to buckets
    if need <= room:
        return "ddp"
    alike = len(here) > 1 and len(set(here.values())) == 1
    chosen = "hsdp" if alike and (frozen + 4 * trained) / here[machine] <= room else "fsdp"
    session.say(
        f"strategy auto: {chosen} for {type(module).__name__}, as its parameters with gradients and Adam's state "
        f"have {need / 2**30:,.1f} GiB, and a device room for {room / 2**30:,.1f} GiB; strategy='ddp' overrules it"
    )
    return chosen


def shard(module: nn.Module, session: Session, device: torch.device, machines: Sequence[Sequence[int]]) -> None:
    """Shard the parameters of `module` over all ranks, then move it to `device`.

    machines: the ranks of each machine, all of which hold a copy of the model; empty: there is one copy. Of a module
    on the meta device, only the parts get memory; `load_weights` then gives them values. Raises OptionError if
    gradients of the run are compressed; or buffers on the meta device are not in the state dict.
    """
    if session.settings.compress != "none":
        hint = f"duoka.start was given compress={session.settings.compress!r}"
        raise OptionError("strategy", "fsdp", "used where gradients are not compressed", hint)
    is_empty = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if is_empty:
        _check_empty(module)
    session.strategy.shard(module, machines)
    if any(map(is_compiled, module.modules())):
        run_uncompiled(session)
    if is_empty:
        module.to_empty(device=device)
    else:
        move(module, device)


def _check_empty(module: nn.Module) -> None:
    """Check that a file of weights can give values to all tensors of a model on the meta device.

    Raises OptionError if some of its tensors have values, which would be lost; or buffers are not in its state dict.
    """
    saved = module.state_dict(keep_vars=True)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if not tensor.is_meta or name not in saved:
            why = "it has values" if not tensor.is_meta else "no file of weights has it"
            hint = "make the model on the CPU, or have the script itself give values to all tensors"
            raise OptionError("run.model", f"a model on the meta device with {name}", f"without that, as {why}", hint)


def _check(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError("run.model", type(module).__name__, "given an nn.Module")
    for part in module.modules():
        if isinstance(part, (nn.DataParallel, DistributedDataParallel)):
            hint = "run.model(net) does what they do"
            raise OptionError("run.model", type(part).__name__, "given the model itself, not wrapped", hint)
    if next(iter(module.parameters()), None) is None:  # a script may return a list
        hint = "a module without parameters is called as it is"
        raise OptionError("run.model", type(module).__name__, "given a module with parameters", hint)
    if any(map(is_dtensor, module.parameters())):
        hint = "run.model(net, strategy='fsdp') shards it"
        raise OptionError("run.model", type(module).__name__, "given a module without torch's DTensors", hint)
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]  # type: ignore[redundant-expr]
    if lazy:
        hint = "call it once on a small example first, so that its parameters get their shapes"
        raise OptionError(
            "run.model", f"{type(module).__name__} with {lazy[0]}", "given initialised parameters", hint
        )


def _layout(module: nn.Module) -> list[tuple[str, str, str]]:
    """Return the name, shape and dtype of each parameter and buffer, to compare the models of all ranks."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, str(tuple(tensor.shape)), str(tensor.dtype)[6:]) for name, tensor in tensors]


def _difference(first: list[tuple[str, str, str]], other: list[tuple[str, str, str]]) -> str:
    """Describe the first difference between two layouts."""
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            return f"their models differ: rank 0 has {' '.join(mine)} where the other has {' '.join(theirs)}"
    longer = max(first, other, key=len)
    name = " ".join(longer[min(len(first), len(other))])
    return f"their models differ: {name} is only on one of them"
