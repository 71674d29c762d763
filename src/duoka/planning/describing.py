"""Describe a plan: `header` before a run, `details` for `--dry-run`."""

from __future__ import annotations

import shlex
from itertools import groupby

from duoka.planning.options import Machines
from duoka.planning.plan import STRATEGIES, Plan, ratio, weighted_sizes
from duoka.script import Kind

COARSE = 1.25  # times as many shares as a device's weight asks for


def header(plan: Plan) -> list[str]:
    """Describe a plan in one to three lines, and a line for each note."""
    if plan.kind is Kind.DISTRIBUTED:
        how = _left_alone(plan)
    else:
        shares, rows = _shares(plan), described_rows(plan)
        divided = f" with {shares}" if shares else f", rows {rows}" if rows else ""
        how = f"strategy {plan.strategy}{divided}, {_script(plan)}"
    lines = [f"{_devices(plan)}, {how}"]
    if plan.machines.count > 1:
        lines.append(_machine(plan.machines))
    other_numbers = {
        "BatchNorm of each share": plan.batch_norm == "local",
        "each rank's own random numbers inside of models": plan.randomness == "worker",
        "random augmentation seeded by sample": plan.loading == "shared",
    }
    chosen = [words for words, holds in other_numbers.items() if holds]
    if plan.kind is not Kind.DISTRIBUTED and not plan.is_for_one and chosen:
        lines.append(f"not the numbers of one device: {', '.join(chosen)}")
    if plan.kind_can_be_either and max(len(plan.devices), plan.machines.count) > 1:
        lines.append(_other_kind(plan))
    return [*lines, *plan.notes]


def _machine(machines: Machines) -> str:
    """Return `machine 1 of 2, rendezvous at node1:29500`."""
    source = f" (set by {machines.engine})" if machines.engine else ""
    return f"{machines.each} {machines.number} of {machines.count}, rendezvous at {machines.rendezvous}{source}"


def described_rows(plan: Plan) -> str:
    """Describe uneven shares: `3 : 1`, `3 : 1 until measured`; empty for even ones."""
    weights = ratio(plan.weights, " : ")
    return f"{weights or 'even'} until measured" if plan.measures_rows else weights


def _shares(plan: Plan) -> str:
    """Return `6 + 2 shares of each batch`, with --strategy exact; empty with others."""
    if not plan.shares or not plan.weights:
        return f"{plan.shares} shares of each batch" * bool(plan.shares)
    counts = weighted_sizes(plan.shares, plan.weights)
    asked = [plan.shares * weight / sum(plan.weights) for weight in plan.weights]
    slowed = max(count / share for count, share in zip(counts, asked, strict=True))
    nearer = f", as {described_rows(plan)} needs more --shares" * (slowed > COARSE)
    return f"{' + '.join(map(str, counts))} shares of each batch{nearer}"


def _script(plan: Plan) -> str:
    return "plain script" if plan.kind is Kind.PLAIN else f"script that uses duoka's API ({plan.kind_reason})"


def _left_alone(plan: Plan) -> str:
    if plan.self_launching:
        return f"run once, as it has ranks of its own ({plan.kind_reason})"
    return f"launched as torchrun would and left alone ({plan.kind_reason})"


def _other_kind(plan: Plan) -> str:
    if plan.kind is Kind.DISTRIBUTED:
        return f"{plan.target.name} can also run as a plain script: choose it by --kind plain"
    return (
        f"{plan.target.name} can also make its own ranks ({plan.kind_reason}): --kind distributed launches it as "
        "torchrun would"
    )


def _devices(plan: Plan) -> str:
    """Describe the devices: `GPUs 0 and 3 (NVIDIA H200)`, `2 CPU workers of 1 thread`."""
    first = plan.devices[0]
    if first.type == "cpu":
        threads = f" of {plan.threads} thread{'s' * (plan.threads > 1)}" if plan.threads else ""
        return f"{plan.workers} CPU worker{'s' * (plan.workers > 1)}{threads}"
    groups = []
    for name, members in groupby(plan.devices, key=lambda device: device.name):
        numbers = [device.number for device in members]
        groups.append(f"GPU{'s' * (len(numbers) > 1)} {', '.join(numbers)}{f' ({name})' * bool(name)}")
    return ", ".join(groups)


def details(plan: Plan) -> str:
    """Describe a plan in full, for `--dry-run`."""
    target = plan.target
    rows = [("run", shlex.join([*["-m"] * target.is_module, target.name, *target.args]))]
    if plan.kind is not Kind.DISTRIBUTED:
        rows.append(("script", _script(plan).replace("plain script", "plain")))
        rows.append(("strategy", f"{plan.strategy}: {STRATEGIES[plan.strategy]}"))
        if plan.shares:
            rows.append(("shares", _shares(plan).replace(" shares", "", 1)))
        if not plan.is_for_one:
            rows.append(("rows", described_rows(plan) or "even"))
        if plan.strategy in ("fsdp", "hsdp"):
            rows.append(("blocks", ", ".join(plan.blocks) or "entries of the model's lists"))
            if plan.checkpoint_activations:
                rows.append(("activations", "of blocks, computed again in the backward pass"))
            if plan.cpu_offload:
                rows.append(("offloaded", "parameters, gradients and optimizer states, to the host's memory"))
        rows += [("batch norm", plan.batch_norm), ("randomness", plan.randomness), ("loading", plan.loading)]
        if plan.row_independent:
            rows.append(("on own rows", f"{', '.join(plan.row_independent)}, as --row-independent says"))
    else:
        rows.append(("script", _left_alone(plan)))
    if plan.kind_can_be_either:
        rows.append(("", _other_kind(plan)))
    if plan.machines.count > 1:
        name, _, text = _machine(plan.machines).partition(" ")
        rows.append((name, text))
    named = [f"{device} ({device.name})" if device.name else str(device) for device in plan.devices]
    rank = "rank" if plan.machines.count == 1 else "local rank"
    if not plan.self_launching:
        named = [f"{rank} {number}: {text}" for number, text in enumerate(named)]
    rows += [("device", text) for text in named]
    rows.append(("threads", f"{plan.threads} per worker" if plan.threads else "left to torch"))
    rows.append(("timeout", f"{plan.timeout:g} s for a collective"))
    idle = "after the first step 20 times the slowest step (at least 60 s) for a rank that is idle"
    rows.append(("", idle if plan.step_timeout is None else f"{plan.step_timeout:g} s after the first step"))
    if plan.restarts:
        rows.append(("restarts", f"{plan.restarts} at most, after faults"))
    if plan.kind is not Kind.DISTRIBUTED and not plan.is_for_one:
        where = "here" if plan.machines.number == 0 else f"at {plan.machines.each} 0"
        rows.append(("output", f"of rank 0 {where}, of the others in {plan.log_dir or 'a temporary directory'}"))
    if plan.report is not None:
        rows.append(("report", f"{plan.report}, written at the end"))
    rows += [("note", note) for note in plan.notes]
    return "\n".join(f"{name:<12}{text}" for name, text in rows)
