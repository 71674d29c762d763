"""Decided settings, frozen. `decide` makes a `Plan` from requested settings; `describing.py` prints it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from duoka import script
from duoka.errors import OptionError
from duoka.hardware import spec
from duoka.hardware.choice import Choice, choose
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory, units
from duoka.planning.options import (
    ONE_MACHINE,
    Computing,
    Machines,
    Options,
    RunSettings,
    Settings,
    one_of,
    row_weights,
    shares_for,
    shares_of,
)
from duoka.script import Kind, Script

__all__ = ["STRATEGIES", "Device", "Kind", "Machines", "Plan", "check_strategy", "decide", "joined", "weighted_sizes"]

STRATEGIES = {
    "auto": "ddp if it fits on each device, else fsdp, as a forecast of memory says before the run",
    "ddp": "every device holds the whole model, and gradients are averaged",
    "exact": "the same bits on any number of devices: batches in a fixed number of shares, sums in a fixed order",
    "fsdp": "each device holds a part of the model: of its parameters, gradients and optimizer's state",
    "hsdp": "as fsdp on each machine, which holds the whole model; gradients are averaged between machines",
    "single": "one device computes everything",
}

_ASKED_IN_SCRIPTS = {
    "auto": "`duoka forecast --memory` says whether a model needs run.model(net, strategy='fsdp')",
    "fsdp": "in a script, run.model(net, strategy='fsdp') shards a model",
    "hsdp": "in a script, run.model(net, strategy='hsdp') shards a model within each machine",
}


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Settings of a run on this machine. One device for each worker: local rank r computes on `devices[r]`.

    A script that starts its own ranks (`self_launching`) is run once, with all devices.
    """

    kind: Kind
    kind_reason: str  # for example "train.py:12 reads RANK"; "" for a plain script
    kind_can_be_either: bool = False  # and --kind did not choose
    devices: tuple[Device, ...]
    strategy: str  # "" for a script with its own torch.distributed; "auto": to be chosen before the run
    threads: int | None  # per worker; None: torch decides
    shares: int = 0  # of each batch, with the strategy exact
    weights: tuple[float, ...] = ()  # of each device's share of a batch; empty: even
    measures_rows: bool = False  # whether the weights follow from the time that each device takes
    notes: tuple[str, ...] = ()  # printed lines on variables and options respected or ignored
    local_rank_flag: str | None = None  # --local_rank or --local-rank, if the script parses it
    self_launching: bool = False

    @property
    def workers(self) -> int:
        """Number of workers of this machine."""
        return 1 if self.self_launching else len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of workers of all machines, once these have connected."""
        return sum(self.machines.workers) or self.workers

    @property
    def ranks(self) -> range:
        """Ranks of this machine's workers."""
        return self.machines.spans[self.machines.number] if self.machines.workers else range(self.workers)

    @property
    def run_settings(self) -> RunSettings:
        """The settings of each rank that change numbers."""
        names = {setting.name for setting in fields(RunSettings)} - {"compress", "machines"}
        return RunSettings(**{name: getattr(self, name) for name in names}, machines=self.machines.ranks())

    @property
    def device_words(self) -> str:
        """The devices in the syntax of `--devices`: `cpu:2`, `0,3`, `gpu:3`."""
        first, numbers = self.devices[0], ",".join(str(device.index) for device in self.devices)
        if first.type == "cpu":
            return f"cpu:{len(self.devices)}"
        return numbers if len(self.devices) > 1 else f"{first.type}:{numbers}"  # one number would be a count

    @property
    def is_for_one(self) -> bool:
        """Return whether the run has one worker."""
        return self.workers == 1 and self.machines.count == 1


def check_strategy(option: str, name: str) -> None:
    """Check the name of a strategy, given by `option`. Raises OptionError if there is no such strategy."""
    if name == "dp":
        hint = "`duoka run --devices 0,1` and duoka.launch(function, devices='0,1') start a process for each device"
        raise OptionError(option, name, "left out: one process computes on one device", hint)
    one_of(option, name, STRATEGIES)


FUNCTION = Script(Kind.API, "duoka.launch")
LOADED = 10  # a GPU of whose memory others use more than one part in so many is taken for one that they share


def decide(options: Options, inventory: Inventory, omp_threads: str | None, known: Script | None = None) -> Plan:
    """Decide the settings of a run, and start nothing.

    omp_threads: OMP_NUM_THREADS, or None. known: what is known of the target, such as FUNCTION; None: it is a script,
    which is read. Raises DeviceError if a device does not exist, or may not be used; OptionError if an option has a
    value that is not allowed, alone or together with the others; ScriptError if the script cannot be read.
    """
    if options.strategy:
        check_strategy("--strategy", options.strategy)
    request = spec.parse(options.devices)
    script_info = known or script.read(options.target)
    chosen = choose(request, inventory)
    machines = options.machines
    if machines.each == "rank":
        chosen = _device_of_rank(chosen, request, machines, inventory.visible)
    kind, reason = _kind(options, script_info, max(len(chosen.devices), machines.count))
    alone = script_info.self_launching and kind is Kind.DISTRIBUTED
    if alone and machines.count > 1:
        hint = f"the script makes its ranks itself ({reason}): start it on each machine in its own way"
        raise OptionError("--machines", machines.count, f"1 for {options.target.name}", hint)
    workers = 1 if alone else len(chosen.devices)
    strategy, strategy_notes = _strategy(options, kind, max(workers, machines.count))
    here = machines.here if machines.each == "rank" else workers  # those that share the cores of this machine
    threads, thread_notes = _threads(options.threads, here, inventory.cores, omp_threads, strategy == "exact")
    several = machines.count > 1 or machines.each == "rank"
    weights, measures, row_notes = rows_of(options.rows, strategy, chosen.devices, inventory, several)
    return Plan(
        **{setting.name: getattr(options, setting.name) for setting in fields(Settings)},  # as requested
        kind=kind,
        kind_reason=reason,
        kind_can_be_either=script_info.can_be_either and options.kind == "auto",
        devices=chosen.devices,
        strategy=strategy,
        threads=threads,
        shares=_shares(strategy, workers, options.shares, machines),
        weights=weights,
        measures_rows=measures,
        notes=chosen.notes + strategy_notes + thread_notes + row_notes,
        local_rank_flag=script_info.local_rank_flag,
        self_launching=alone,
    )


def _device_of_rank(chosen: Choice, request: spec.Request, machines: Machines, visible: str | None) -> Choice:
    """Return the device of a command that is one rank: that with its number among the commands of its machine.

    An engine may make only one device visible to each process. Raises OptionError if there is no such device, or its
    number is unknown.
    """
    rank, here, devices = machines.local_rank, machines.here, chosen.devices
    if request.pick:
        hint = f"{machines.engine} has started a process for each rank, and each would pick on its own"
        raise OptionError("--devices", str(request), "numbers", hint)
    # One device for all is meant on CPUs, if the engine shows each process its own, and where there is one rank only.
    if len(devices) == 1 and (devices[0].type == "cpu" or visible is not None or here == 1):
        return chosen
    if rank >= len(devices) or (here not in (0, len(devices)) and str(request) != "auto"):
        ranks = f"{here or f'more than {rank}'} ranks"
        hint = f"{machines.engine} has started a process for each rank"
        devices_for_ranks = f"{len(devices)} devices for {ranks} on this machine"
        raise OptionError("--devices", devices_for_ranks, "one device for each rank", hint)
    return replace(chosen, devices=devices[rank : rank + 1])


def joined(plan: Plan, workers: tuple[int, ...], names: tuple[str, ...], hosts: tuple[str, ...] = ()) -> Plan:
    """Return the plan completed with the workers, host names and real machines of each machine.

    Raises OptionError if the strategy exact or hsdp, or `--rows`, does not allow these numbers of ranks.
    """
    machines = replace(plan.machines, workers=workers, names=names, hosts=hosts)
    if plan.weights and not plan.measures_rows:
        shares_of(plan.weights, sum(workers), "--rows")
    plan = replace(plan, machines=machines, shares=_shares(plan.strategy, sum(workers), plan.shares or None))
    return _hybrid(plan) if plan.strategy == "hsdp" else plan


def _hybrid(plan: Plan) -> Plan:
    """Return the plan of strategy hsdp: fsdp for one machine, ddp for machines of one rank each.

    Raises OptionError if they have different numbers of ranks.
    """
    counts = [len(members) for members in plan.machines.ranks()]
    if len(set(counts)) > 1:
        hint = f"they have {', '.join(map(str, counts))}"
        raise OptionError("--strategy", "hsdp", "fsdp on machines with different numbers of workers", hint)
    if len(counts) == 1:
        return replace(plan, strategy="fsdp")
    return plan if counts[0] > 1 else replace(plan, strategy="ddp")


def _kind(options: Options, script_info: Script, devices: int) -> tuple[Kind, str]:
    """Return the kind of a script and the reason. One that can be either is plain on one device."""
    if options.kind != "auto":
        return Kind(options.kind), "--kind says so"
    if script_info.can_be_either and devices == 1:
        return Kind.PLAIN, script_info.reason
    return script_info.kind, script_info.reason


def _strategy(options: Options, kind: Kind, workers: int) -> tuple[str, tuple[str, ...]]:
    if kind is Kind.DISTRIBUTED:
        asked = Options(options.target)  # the defaults
        names = ("strategy", "shares", "rows", *(setting.name for setting in fields(Computing)))
        unused = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(asked, name)]
        return "", (f"{', '.join(unused)}: without effect, as the script is left alone",) if unused else ()
    if options.strategy in ("auto", "fsdp", "hsdp") and kind is Kind.API:
        hint = _ASKED_IN_SCRIPTS[options.strategy]
        raise OptionError("--strategy", options.strategy, "left out or ddp, which starts a worker per device", hint)
    if options.blocks and options.strategy not in ("auto", "fsdp", "hsdp"):
        raise OptionError("--blocks", ",".join(options.blocks), "given with --strategy fsdp, hsdp or auto")
    if options.checkpoint_activations and options.strategy not in ("fsdp", "hsdp"):
        hint = "auto adds it if nothing else fits" if options.strategy == "auto" else ""
        raise OptionError("--checkpoint-activations", True, "given with --strategy fsdp or hsdp", hint)
    if options.cpu_offload and options.strategy not in ("fsdp", "hsdp"):
        raise OptionError("--cpu-offload", True, "given with --strategy fsdp or hsdp")
    if options.strategy == "exact":
        for name, words in (("batch_norm", "local"), ("randomness", "worker")):
            if getattr(options, name) == words:
                option = f"--{name.replace('_', '-')}"
                raise OptionError(option, words, "left out with --strategy exact", "it would depend on the devices")
        return "exact", ()
    if options.shares is not None:
        raise OptionError("--shares", options.shares, "given with --strategy exact")
    if workers == 1 and options.cpu_offload:
        raise OptionError("--cpu-offload", True, "given for several devices", "with one it is not implemented")
    if workers == 1:
        named = options.strategy in ("auto", "ddp", "fsdp", "hsdp")
        return "single", (f"--strategy {options.strategy}: one device has nothing to keep in step",) * named
    if options.strategy == "single":
        raise OptionError(
            "--strategy", "single", f"ddp, fsdp, exact or auto for {workers} devices", "or ask for one device"
        )
    if options.strategy == "hsdp" and options.machines.count == 1:
        return "fsdp", ("--strategy hsdp: fsdp on one machine",)
    return options.strategy or "ddp", ()


def _shares(strategy: str, ranks: int, asked: int | None, machines: Machines = ONE_MACHINE) -> int:
    """Return the number of shares of each batch; for several machines, not yet connected, the requested one."""
    if strategy != "exact":
        return 0
    return shares_for(ranks, asked) if machines.count == 1 else asked or 0


def _threads(
    asked: int | None, workers: int, cores: int, omp: str | None, exact: bool = False
) -> tuple[int | None, tuple[str, ...]]:
    """Return the threads of each worker: the requested number, else OMP_NUM_THREADS, else an equal part of the cores.

    exact: the same for any number of workers, as sums within an operation depend on it.
    """
    if asked is not None or (workers == 1 and not exact):
        return asked, ()
    # A single number: OpenMP also takes a list of them, one for each level of nested parallel regions.
    if omp is not None and re.fullmatch(r"[1-9][0-9]{0,3}", omp):
        return int(omp), (f"OMP_NUM_THREADS={omp} respected",)
    return 1 if exact else max(1, cores // workers), ()


# The rows of a batch that each device has: weights from `--rows` or the devices, and numbers from weights.


def rows_of(
    asked: str, strategy: str, devices: Sequence[Device], inventory: Inventory, several: bool
) -> tuple[tuple[float, ...], bool, tuple[str, ...]]:
    """Return the weights of the devices' shares of a batch, whether they are measured, and notes for the user.

    asked: the value of `--rows`; "": as "auto" where devices of this machine differ, else even. several: this command
    is one of several, whose devices are not known yet. Raises OptionError if there is not one number for each device.
    """
    if strategy in ("", "single"):
        return (), False, (f"--rows {asked}: one device has all rows",) * bool(asked and strategy)
    if asked in ("", "auto"):
        gpus = {unit.uuid: unit for unit in units(inventory.gpus)}
        used = [gpus[device.uuid] for device in devices if device.uuid in gpus]
        guess = () if several else _guess(used)
        if not asked and (several or not _differ(used)):
            return (), False, ()
        if strategy == "exact":
            return guess, False, ("--rows auto: the first guess, which is not measured with --strategy exact",)
        return guess, True, ()
    if several:  # `joined` knows how many there are
        return () if asked == "even" else row_weights(asked), False, ()
    return *shares_of(asked, len(devices), "--rows"), ()


def _guess(gpus: Sequence[Gpu]) -> tuple[float, ...]:
    """Return weights for GPUs that are not measured yet; empty: even, also if their speed is unknown.

    Each is the smaller of a GPU's parts of all speed and of all free memory, so that what fits in some way is likely
    to fit in this one.
    """
    speeds, free = [gpu.speed for gpu in gpus], [gpu.memory - (gpu.used or 0) for gpu in gpus]
    if not all(speeds) or min(free, default=0) <= 0:
        return ()
    parts = [min(speed / sum(speeds), room / sum(free)) for speed, room in zip(speeds, free, strict=True)]
    return tuple(round(part / min(parts), 2) for part in parts) if len(set(parts)) > 1 else ()


def _differ(gpus: Sequence[Gpu]) -> bool:
    """Return whether GPUs differ in model or memory, or in what other programs use of them."""
    models = {(gpu.name, gpu.capability, gpu.memory >> 30) for gpu in gpus}  # cards of a model differ by some MiB
    loads = {(gpu.used or 0) * LOADED > gpu.memory for gpu in gpus}
    return len(models) > 1 or len(loads) > 1


def weighted_sizes(n: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rows of each rank, in proportion to its weight: they sum to `n`.

    By the method of largest remainders (Hamilton's): each rank gets its quota rounded down, and those with the
    largest remainders one row more. Every rank gets at least one row if there is one for each, as functions such as
    `amax` have no value for none. A rank with a larger weight than another never gets fewer rows.
    """
    exact = [Fraction(weight) for weight in weights]  # floats would order equal remainders by how they are rounded
    quotas = [n * weight / sum(exact) for weight in exact]
    sizes = [int(quota) for quota in quotas]
    ranks = range(len(weights))
    by_remainder = sorted(ranks, key=lambda rank: (sizes[rank] - quotas[rank], -weights[rank], -rank))
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    if n >= len(weights):
        while (least := min(sizes)) == 0:
            most = max(ranks, key=lambda rank: (sizes[rank], -weights[rank], rank))
            sizes[sizes.index(least)] += 1
            sizes[most] -= 1
    return tuple(sizes)


def ratio(weights: Sequence[float], between: str = ":") -> str:
    """Return weights as `--rows` takes them, such as 3:1 or 1:100000."""
    return between.join(f"{round(weight / min(weights), 2):.9g}" for weight in weights)
