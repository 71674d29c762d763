"""Forecasts with given numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from duoka.forecasting.forecast import Forecast, TimedRun
from duoka.forecasting.timer import Timing
from duoka.hardware.gpu import Device
from duoka.planning.options import Options
from duoka.planning.plan import Kind, Plan
from duoka.script import Target

ONE = Timing(30, 20, (0.010,) * 20, 0.0, 0.0, "", 64, 1)


def run(count: int, device: str = "cpu", **changed: Any) -> TimedRun:
    """Create a run. changed: fields of a timing with a step of 10 ms; `step`: seconds of each step."""
    if "step" in changed:
        changed["windows"] = (changed.pop("step"),) * 20
    timing = replace(ONE, **changed)
    index = None if device == "cpu" else 0
    return TimedRun(f"{device}:{count}", plan(tuple(Device(device, index) for _ in range(count))), timing)


def plan(devices: tuple[Device, ...]) -> Plan:
    options = Options(Target("train.py"))
    return Plan(
        target=options.target,
        kind=Kind.PLAIN,
        kind_reason="",
        kind_can_be_either=False,
        devices=devices,
        strategy="single" if len(devices) == 1 else "ddp",
        batch_norm="whole",
        randomness="whole",
        loading="auto",
        threads=None,
        timeout=600.0,
        step_timeout=None,
        log_dir=None,
        verbosity="normal",
    )


ONE_DEVICE = plan((Device("cpu"),))


def forecast(*runs: TimedRun, cores: int = 64) -> Forecast:
    """Create a forecast on a machine with so many cores."""
    return Forecast("train.py", cores, runs)
