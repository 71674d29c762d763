"""`duoka.start`: find this process's rank and open a run."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import torch

from duoka.collectives.base import Collectives, OneRank
from duoka.errors import DeviceError, OptionError
from duoka.hardware import accelerator
from duoka.hardware.vendors import TYPES, visible
from duoka.origins.origin import Forked, Origin, find_origin
from duoka.origins.process import this_process
from duoka.planning.options import (
    LONGEST,
    BatchNorm,
    Loading,
    Randomness,
    RunSettings,
    check_names,
    one_of,
    shares_of,
)
from duoka.run.agreement import check_same
from duoka.run.api_session import open_api_session
from duoka.run.logs import Logs, check_logs
from duoka.run.run import Run
from duoka.strategies.compress import compression
from duoka.system import environment
from duoka.system.messages import say
from duoka.view.generators import seed_all

TIMEOUT = 600.0


def start(
    seed: int | None = None,
    *,
    device: str | torch.device = "auto",
    batch_norm: BatchNorm | None = None,
    randomness: Randomness | None = None,
    loading: Loading | None = None,
    timeout: float | None = None,
    log: str | Sequence[str] = "console",
    compress: str = "none",
    row_independent: Sequence[str] | None = None,
    cpu_offload: bool = False,
    rows: str | Sequence[float] | None = None,
) -> Run:
    """Find this process's rank, connect to the others, and open a run, until `run.close()`. One is open at a time.

    Works alone (`python train.py`), under `duoka run`, `duoka.launch`, torchrun, srun and mpirun.

    Args:
        seed: for torch's, Python's and numpy's generators, the same on all ranks; None: rank 0 draws one for all;
            a single rank keeps its generators' states.
        device: "auto" (the device assigned to this rank, else its GPU, else the CPU), or a device as torch names it.
        batch_norm: "whole": statistics of the whole batch, as on one device; "local": of each rank's rows.
        randomness: "whole": random numbers in models are those of one device; "worker": each rank draws its own.
        loading: "auto": each rank reads only its own rows if reading draws no random number, else all; "shared":
            its own rows, and every sample has its own random stream; "whole": all rows.
        timeout: seconds that a rank waits for the others.
        log: logs of `run.log`: "console", "csv:PATH", "jsonl:PATH", or several of them.
        compress: gradients between ranks. "bf16" or "fp16": in 16 bits, half the traffic. "powersgd",
            "powersgd:RANK" or "powersgd:RANK:AFTER": matrices of that rank, after so many backward passes (1000).
        row_independent: names of autograd Functions, scripted functions or operators of extensions (`Scan`,
            `train.Scan`, `mylib::square`) that compute each row by itself. Without it they are computed whole by
            every rank, since nothing proves it; `duoka prove` compares the numbers.
        cpu_offload: True: keep parameters, gradients and optimizer states of sharded models (`run.model(net,
            strategy="fsdp")`) in the host's memory, and gather blocks on the device. For several ranks.
        rows: the ranks' shares of each batch: a number for each rank, (3, 1) or "3:1"; "auto": as fast as each
            computes, measured in the first steps of an optimizer; "even".

    Omitted options are those of `duoka run`, or else whole, whole, auto, 600, no name, False and "even".

    Raises:
        OptionError: a value is not allowed, or a run is open already.
        DeviceError: the device does not exist.
        TimedOut: another rank did not connect.
        RanksApart: another rank has other options.
    """
    process = this_process()
    if process.run is not None:
        raise OptionError("duoka.start()", "called again", "called once", "close the run before: run.close()")
    origin = process.origin or find_origin()
    if seed is None and isinstance(origin, Forked):
        seed = origin.seed
    defaults = origin.plan if isinstance(origin, Forked) else None
    names = (row_independent,) if isinstance(row_independent, str) else row_independent
    weights, measures = (None, None) if rows is None else shares_of(rows, origin.world_size)
    settings = _settings(
        defaults.run_settings if defaults else RunSettings(),
        batch_norm=batch_norm,
        randomness=randomness,
        loading=loading,
        compress=compress,
        row_independent=None if names is None else tuple(names),
        cpu_offload=cpu_offload,
        weights=weights,
        measures_rows=measures,
    )
    if timeout is None:
        timeout = defaults.timeout if defaults else TIMEOUT
    if not 0 < timeout <= LONGEST:
        raise OptionError("timeout", timeout, "more than 0 seconds and at most 30 days")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise OptionError("seed", seed, "a whole number from 0 to 2**63 - 1, or None")
    logs = check_logs(log)
    chosen = choose_device(device, origin)
    ranks = _connect(origin, timeout)
    options = {"seed": seed, "device": chosen.type, **asdict(settings)}
    check_same(options, ranks, lambda first, other: f"duoka.start was given {first} by rank 0, but {other}")
    entropy = ranks.broadcast_object(secrets.randbits(63), 0) if seed is None else seed
    if seed is not None or ranks.world_size > 1:
        seed_all(entropy)
    opened = Logs(logs if origin.rank == 0 else [])
    tell = say if origin.rank == 0 else lambda text: None
    run = Run(origin, chosen, open_api_session(ranks, settings, chosen, entropy, tell), opened)
    process.run = run
    atexit.register(_close_at_exit, run)
    return run


def _settings(defaults: RunSettings, **options: Any) -> RunSettings:
    """Return the defaults changed by the options that are not None. Raises OptionError if one is not allowed."""
    settings = replace(defaults, **{name: value for name, value in options.items() if value is not None})
    compression(settings.compress)  # raises an error for an unknown method
    for name, allowed in (("batch_norm", BatchNorm), ("randomness", Randomness), ("loading", Loading)):
        one_of(name, getattr(settings, name), get_args(allowed))
    check_names("row_independent", settings.row_independent)
    return settings


def choose_device(asked: str | torch.device, origin: Origin) -> torch.device:
    """Return the device of this rank, and make it torch's current one. Raises DeviceError if it does not exist."""
    automatic = str(asked) == "auto"
    try:
        device = torch.device(origin.device or accelerator.best() if automatic else asked)
    except (RuntimeError, TypeError):
        raise OptionError("device", asked, f"auto, or what torch calls it (cpu, {', '.join(TYPES)})") from None
    if device.type == "cpu":
        return torch.device("cpu")
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if module and module.is_available() else 0
    if count == 0:
        raise DeviceError(f"device {str(asked)!r}: torch finds no {device.type} device here; use auto or cpu")
    index: int | None = device.index
    if index is None:
        index = origin.local_rank if origin.device is None else 0
        if count == 1 and visible(device.type) is not None:  # an engine makes one GPU visible to each process
            index = 0
    if index >= count:
        raise DeviceError(f"local rank {origin.local_rank} has no {device.type} device: there are {count}")
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _connect(origin: Origin, timeout: float) -> Collectives:
    if origin.world_size == 1:
        return OneRank()
    process = this_process()
    if process.communication is None:
        process.communication = origin.connect(timeout)
        if not isinstance(origin, Forked) and environment.threads() is None:  # forked workers have theirs set
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.communication.here))
    process.runs += 1  # also if it fails: the next run has keys of its own
    return process.communication.collectives(origin.rank, origin.world_size, timeout, process.runs)


def _close_at_exit(run: Run) -> None:
    """Close a run that the script has left open; after an error without waiting for other ranks."""
    if this_process().run is run:
        run.close(wait=getattr(sys, "last_type", None) is None)
