"""The plan of the next attempt after a device was lost, or after memory ran out on one rank.

A batch is global, so a run goes on with fewer devices, or with other shares, and the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from duoka.devices.inventory import Inventory, units
from duoka.launchers.hints import MEMORY
from duoka.launchers.verdict import Verdict
from duoka.launchers.worker_group import Worker
from duoka.plan import Kind, Plan
from duoka.private.texts import LOST_GPU, says
from duoka.supervision.status_board import name_ranks

LESS = 0.7  # of its rows, for a rank whose memory ran out
SIZES = (  # in torch's error: asked for, free, in use, and kept for later
    r"Tried to allocate ([\d.]+) (\w+)",
    r"of which ([\d.]+) (\w+) is free",
    r"([\d.]+) (\w+) is allocated by PyTorch",
    r"([\d.]+) (\w+) is reserved by PyTorch but",
)
UNITS = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def next_plan(plan: Plan, verdict: Verdict, read: Callable[[str], Inventory], say: Callable[[str], None]) -> Plan:
    """Return the plan of the attempt after one that ended by a fault; `say` prints how it differs.

    It is the same for several machines, each of which knows its own devices only, and for a script with its own
    torch.distributed, whose batches would be other ones. read: the devices of this machine as they are now.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1 or plan.is_for_one:
        return plan
    if lost := _lost(plan, verdict, read):
        return _without(plan, lost, say)
    weights = with_fewer_rows(plan, verdict) if plan.measures_rows else ()
    if weights:
        short = name_ranks([worker.rank for worker in verdict.culprits])
        say(f"memory ran out on {short}: the next attempt begins with --rows {ratio(weights)}")
    return replace(plan, weights=weights or plan.weights)


def with_fewer_rows(plan: Plan, verdict: Verdict) -> tuple[float, ...]:
    """Return weights of shares with less for the ranks whose memory ran out; empty if that is not what happened."""
    parts = {worker.rank: part_to_try(_error(worker)) for worker in verdict.culprits}
    if plan.machines.count > 1 or not 0 < len(parts) < plan.workers or not all(parts.values()):
        return ()
    before = verdict.rows if verdict.rows and all(verdict.rows) else plan.weights or (1,) * plan.workers
    return tuple(weight * parts.get(rank, 1) for rank, weight in enumerate(before))


def part_to_try(error: str) -> float:
    """Return which part of a rank's rows to try after its memory ran out; 0 if the error tells of something else.

    The step would have used more than the error tells: this is a guess, but no more than what is known not to fit.
    """
    if not re.search(MEMORY, error):
        return 0.0
    found = [re.search(pattern, error) for pattern in SIZES]
    asked, free, used, kept = (float(size[1]) * UNITS[size[2]] if size is not None else 0.0 for size in found)
    return min(LESS, (free + used + kept) / (used + asked)) if used else LESS


def ratio(weights: Sequence[float]) -> str:
    """Return weights as `--rows` takes them, such as 3:1."""
    return ":".join(f"{weight / min(weights):.3g}" for weight in weights)


def _lost(plan: Plan, verdict: Verdict, read: Callable[[str], Inventory]) -> set[int]:
    """Return the ranks whose device cannot be used any more."""
    found = {worker.rank for worker in verdict.culprits if says(_error(worker), *LOST_GPU)}
    kind = plan.devices[0].type
    if kind != "cpu":
        well = {unit.uuid for unit in units(read(kind).gpus) if not unit.problem}
        # A driver that names none of them does not answer at all.
        if any(device.uuid in well for device in plan.devices):
            found |= {rank for rank, device in enumerate(plan.devices) if device.uuid not in well}
    return found


def _error(worker: Worker) -> str:
    return worker.ending.error if worker.ending is not None else ""


def _without(plan: Plan, lost: set[int], say: Callable[[str], None]) -> Plan:
    left = [rank for rank in range(plan.workers) if rank not in lost]
    if not left:
        return plan
    for rank in sorted(lost):
        device = plan.devices[rank]
        say(f"{device}{f' ({device.name})' if device.name else ''} of rank {rank} is lost, and left out from now on")
    alone = len(left) == 1 and plan.strategy != "exact"
    return replace(
        plan,
        devices=tuple(plan.devices[rank] for rank in left),
        strategy="single" if alone else plan.strategy,
        weights=tuple(plan.weights[rank] for rank in left) if plan.weights and len(left) > 1 else (),
        measures_rows=plan.measures_rows and len(left) > 1,
    )
