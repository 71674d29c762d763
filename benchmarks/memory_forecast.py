"""Peak memory that `duoka forecast --memory` tells, beside what is then measured on CPU workers.

    python -m benchmarks.memory_forecast predict script.py ... > predictions.json
    python -m benchmarks.memory_forecast measure predictions.json > measured.json

Measured is, on each rank and over steps 2 and 3, the most bytes of tensors that are alive at once (those that torch's
operators return); the largest rank counts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from duoka.forecasting.memory import STEPS, MemoryRequest, forecast_memory, layouts
from duoka.forecasting.memory_recorder import Storages
from duoka.hardware import inventory
from duoka.planning.options import Options
from duoka.planning.plan import Plan, decide
from duoka.script import Target
from duoka.trials.observer import TrialObserver
from duoka.trials.runner import trial_runner

DEVICES = (1, 2, 4)


class PeakObserver(TrialObserver):
    """Measures the peak of each rank."""

    def __init__(self) -> None:
        super().__init__(STEPS, 0)
        self._live = Storages()

    def install(self) -> None:
        register_optimizer_step_post_hook(self._after)
        self._live.__enter__()

    def close(self) -> None:
        self._live.__exit__(None, None, None)
        (self.folder / f"peak-{self.slot.rank}").write_text(str(self._live.peak))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.slot.steps == self.steps:
            return
        self.steps = self.slot.steps
        if self.steps == 1:
            self._live.peak = self._live.total
        if self.steps >= self.wanted:
            self.enough()


def _plan(script: str, devices: int, **options: Any) -> Plan:
    asked = replace(Options(Target(script)), devices=f"cpu:{devices}", **options)
    return decide(asked, inventory.read(), None)


def predict(scripts: list[str]) -> dict[str, dict[str, int]]:
    """Return the predicted bytes by script and layout."""
    found = {}
    for script in scripts:
        request = MemoryRequest(
            script, _plan(script, 1), [f"cpu:{one}" for one in DEVICES], DEVICES, [None] * len(DEVICES), (), None
        )
        found[script] = {_name(need.layout): need.bytes for need in forecast_memory(request, _say).needs}
    return found


def measure(scripts: list[str]) -> dict[str, dict[str, int]]:
    """Return the measured bytes by script and layout."""
    found: dict[str, dict[str, int]] = {}
    for script in scripts:
        found[script] = {}
        for layout in (one for devices in DEVICES for one in layouts(devices)):
            options = {"strategy": layout.strategy} if layout.devices > 1 else {}
            plan = _plan(script, layout.devices, checkpoint_activations=layout.checkpoints, **options)
            with trial_runner("forecast", None) as trials, trials.run("memory", plan, PeakObserver()) as folder:
                found[script][_name(layout)] = max(int(path.read_text()) for path in folder.glob("peak-*"))
            _say(f"{script} {_name(layout)}: {found[script][_name(layout)]:,}")
    return found


def _name(layout: Any) -> str:
    return f"{layout.strategy} {layout.devices}{' recomputed' * layout.checkpoints}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(predicted: dict[str, Any], measured: dict[str, Any]) -> None:
    errors = []
    for script, layouts_ in measured.items():
        for name, value in layouts_.items():
            error = predicted[script][name] / value - 1
            errors.append(abs(error))
            told = predicted[script][name]
            _say(f"{Path(script).stem:20} {name:18} {told / 1e6:10.2f} {value / 1e6:10.2f} {error:+8.1%}")
    errors.sort()
    _say(f"median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}, of {len(errors)}")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "predict":
        print(json.dumps(predict(words), indent=1))
    else:
        predictions = json.loads(Path(words[0]).read_text())
        measurements = measure(list(predictions))
        print(json.dumps(measurements, indent=1))
        _table(predictions, measurements)
