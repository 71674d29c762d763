"""The plan of the next attempt after a device was lost, or after memory ran out on one rank.

A batch is global, so a run goes on with fewer devices, or with other shares, and the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from duoka.devices.inventory import Inventory, units
from duoka.launchers.hints import MEMORY
from duoka.launchers.verdict import Verdict
from duoka.launchers.worker_group import Worker
from duoka.plan import Kind, Plan
from duoka.private.texts import LOST_GPU, says

LESS = 0.7  # of its rows, for a rank whose memory ran out


def next_plan(plan: Plan, verdict: Verdict, read: Callable[[str], Inventory], say: Callable[[str], None]) -> Plan:
    """Return the plan of the attempt after one that ended by a fault; `say` prints how it differs.

    It is the same for several machines, each of which knows its own devices only, and for a script with its own
    torch.distributed, whose batches would be other ones. read: the devices of this machine as they are now.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1 or plan.is_for_one:
        return plan
    if lost := _lost(plan, verdict, read):
        return _without(plan, lost, say)
    short = [worker.rank for worker in verdict.culprits if re.search(MEMORY, _error(worker))]
    return _with_fewer_rows(plan, short, say) if plan.measures_rows and 0 < len(short) < plan.workers else plan


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


def _with_fewer_rows(plan: Plan, short: list[int], say: Callable[[str], None]) -> Plan:
    before = plan.weights or (1.0,) * plan.workers
    weights = tuple(weight * LESS if rank in short else weight for rank, weight in enumerate(before))
    ratio = " : ".join(f"{weight / min(weights):.3g}" for weight in weights)
    for rank in short:
        say(f"memory ran out on rank {rank}, which gets fewer rows: {ratio}")
    return replace(plan, weights=weights)
