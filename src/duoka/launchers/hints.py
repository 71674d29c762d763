"""Advice on errors whose own message does not say what to do."""

from __future__ import annotations

import re
import shlex

from duoka.hardware.vendors import NO_GPU
from duoka.planning.plan import Kind, Plan
from duoka.script.files import STANDARD_INPUT

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
}


def hints(error: str, plan: Plan, fewer_rows: str = "") -> list[str]:
    """Return a line of advice for the last line of a traceback, or an empty list.

    fewer_rows: of `--rows`, with fewer rows for this rank; empty if others cannot have them.
    """
    others = (f"  {hint}" for pattern, hint in HINTS.items() if re.search(pattern, error))
    return memory_hints(error, plan, fewer_rows) or [*others][:1]


def memory_hints(error: str, plan: Plan, fewer_rows: str = "") -> list[str]:
    """Return a line of advice if memory ran out, or an empty list."""
    if not re.search(MEMORY, error):
        return []
    where = "this device" if plan.is_for_one else "this rank"
    return [f"  memory ran out on {where}; what helps: {_less_memory(plan, fewer_rows)}"]


def _less_memory(plan: Plan, fewer_rows: str) -> str:
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
    tells = f"`duoka forecast --memory {devices}{words}` says what fits{_takes_less(plan)}"
    return f"{batch}, more devices, or less on each: {tells}"


def _takes_less(plan: Plan) -> str:
    """Name the option, or the argument of the API, with which the same devices may be enough."""
    if plan.kind is Kind.API:
        return "; run.model(net, strategy='fsdp') needs less than ddp on several devices"
    if plan.is_for_one:
        return ""
    if plan.strategy == "ddp":
        return ", and --strategy auto takes it"
    if plan.strategy not in ("fsdp", "hsdp"):
        return ""
    options = {
        "--checkpoint-activations": plan.checkpoint_activations,
        "--cpu-offload": plan.cpu_offload or plan.devices[0].type == "cpu",
    }
    return (
        f"; {' or '.join(left)} needs less" if (left := [name for name, used in options.items() if not used]) else ""
    )
