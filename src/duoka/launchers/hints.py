"""Advice on errors whose own message does not say what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from duoka.hardware.gpu import Device
from duoka.hardware.vendors import FAULTS, NO_GPU
from duoka.planning.plan import Kind, Plan
from duoka.script.target import STANDARD_INPUT

MEMORY = r"MemoryError|OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory"
# Pattern of an error's last line -> advice.
HINTS = {
    r"Too many open files": (
        "this process may open no more files; `ulimit -n` shows how many it may, `ulimit -n 65536` raises it"
    ),
    r"insufficient shared memory|shm|Bus error|unable to open shared memory": (
        "shared memory ran out (`df /dev/shm`); in a container: --shm-size=8g, or fewer DataLoader workers"
    ),
    r"Function not implemented|Read-only file system": (
        "a file system is missing or cannot be written; where a DataLoader was made, that is /dev/shm: num_workers=0 "
        "does without it"
    ),
    NO_GPU: (
        "the script asks for GPUs, and this run has none: `--devices 0,1` gives it some (`duoka gpus` lists "
        "them); on CPUs its own option for the backend must say gloo, or `--kind plain` runs it as on one device"
    ),
    r"device-side assert": (
        "a kernel on this rank's GPU met an index or a label out of range, and the line above may be a later one; "
        "`--devices cpu:2` names the line and the index"
    ),
    r"invalid device ordinal": (
        "each rank sees one GPU, number 0; with duoka's API, run.device is the device to use"
    ),
    r"No space left on device": "a disk is full, or /dev/shm is: `df -h` shows which",
    r"DataLoader worker .* killed by signal: Killed": (
        "a loader worker was killed, mostly by the kernel when memory ran out; what helps: fewer DataLoader workers"
    ),
    FAULTS: (
        "a kernel failed on this rank's GPU, and the line above may be a later one; `--devices cpu:2` names the line "
        "if the script is the cause, and `dmesg` has the driver's lines if the GPU is"
    ),
}


def hints(error: str, plan: Plan, held: Sequence[int] = (), fewer_rows: str = "") -> list[str]:
    """Return a line of advice for the last line of a traceback, or an empty list.

    held: when memory ran out (`Ending.held`). fewer_rows: of `--rows`, with fewer rows for this rank; empty if others
    cannot have them.
    """
    others = (f"  {hint}" for pattern, hint in HINTS.items() if re.search(pattern, error))
    return memory_hints(error, plan, held, fewer_rows) or [*others][:1]


def lost_hints(plan: Plan, problems: Mapping[Device, str]) -> list[str]:
    """Return a line of advice on devices that have failed. problems: of each, what the driver says of it."""
    which = ", ".join(f"{device}{f' ({problem})' * bool(problem)}" for device, problem in problems.items())
    others = ",".join(device.number for device in plan.devices if device not in problems)
    goes_on = ", as --restarts 1 does" * (plan.kind is not Kind.DISTRIBUTED and plan.machines.count == 1)
    without = f"; `--devices {others}` goes on without it{goes_on}" if others else ""
    return [f"  {which} failed, not the script; `dmesg` has the driver's reason (Xid){without}"]


def memory_hints(error: str, plan: Plan, held: Sequence[int] = (), fewer_rows: str = "") -> list[str]:
    """Return a line of advice if memory ran out, or an empty list."""
    if not re.search(MEMORY, error):
        return []
    where = "this device" if plan.is_for_one else "this rank"
    which = f", which held {_parts(*held)}" if any(held[:3]) else ""
    return [f"  memory ran out on {where}{which}; what helps: {_less_memory(plan, sum(held[:3]), fewer_rows)}"]


def _parts(parameters: int, gradients: int, states: int, total: int) -> str:
    """Return what a device held: `2 GiB of parameters, 4 GiB of the optimizer's state`."""
    others = total - parameters - gradients - states
    sizes = {"parameters": parameters, "gradients": gradients, "the optimizer's state": states}
    known = [f"{_size(size)} of {name}" for name, size in sizes.items() if size]
    rest = [f"{_size(others)} of activations and others"] * (others > 0)
    return ", ".join([*known, *rest]) + ", before the optimizer had its state" * (not states)


def _size(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def _less_memory(plan: Plan, model: int, fewer_rows: str) -> str:
    """Return what helps. model: bytes of the parts that strategies divide."""
    batch = "a smaller batch_size" + " (it counts all ranks)" * (plan.kind is not Kind.DISTRIBUTED)
    if fewer_rows:
        batch = f"fewer rows for this rank (--rows {fewer_rows}), {batch}"
    target = plan.target
    is_script = plan.kind_reason != "duoka.launch" and target.name != STANDARD_INPUT
    if plan.kind is Kind.DISTRIBUTED or not is_script:
        return f"{batch}, more devices"
    devices = "" if plan.is_for_one else f"--devices {plan.device_words} "
    if plan.machines.count > 1:
        devices = f"{devices}--machines {plan.machines.count} " if plan.machines.each == "machine" else ""
    words = shlex.join([*["-m"] * target.is_module, target.name, *target.args])
    tells = f"`duoka forecast --memory {devices}{words}` says what fits{_takes_less(plan, model)}"
    return f"{batch}, more devices, or less on each: {tells}"


def _takes_less(plan: Plan, model: int) -> str:
    """Name the option, or the argument of the API, with which the same devices may be enough."""
    divided = f" ({_size(model - model / plan.world_size)} less on each)" * bool(model and not plan.is_for_one)
    if plan.kind is Kind.API:
        return f"; run.model(net, strategy='fsdp') needs less than ddp on several devices{divided}"
    if plan.is_for_one:
        return ""
    if plan.strategy == "ddp":
        return f"; --strategy fsdp needs less{divided}, and --strategy auto takes what fits"
    if plan.strategy not in ("fsdp", "hsdp"):
        return ""
    options = {
        "--checkpoint-activations": plan.checkpoint_activations,
        f"--cpu-offload{f' ({_size(model)} less)' * bool(model)}": plan.cpu_offload or plan.devices[0].type == "cpu",
    }
    left = [name for name, used in options.items() if not used]
    return f"; {' or '.join(left)} needs less" if left else ""
