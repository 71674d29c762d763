"""A seeded script that uses duoka draws the numbers that it draws without duoka."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SEEDED = """
import random
import numpy as np
import torch
from torch import nn

torch.manual_seed(1), np.random.seed(1), random.seed(1)
net, data = nn.Sequential(nn.PReLU(), nn.Flatten()), torch.ones(8, 2)
def states():
    return torch.get_rng_state().tolist(), np.random.get_state(), random.getstate()
before = str(states())
{used}
assert str(states()) == before
"""
EVERY_MODULE = """
import importlib, pkgutil
import duoka
import rich.style  # draws; duoka's commands import it, and a progress bar
before = str(states())
for module in pkgutil.walk_packages(duoka.__path__, "duoka."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of an extra that is not installed
            continue
        assert str(states()) == before, module.name
"""
EVERY_FUNCTION = """
import duoka
duoka.devices("cpu")
run = duoka.start()

model = run.model(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = duoka.Checkpoint("saved", {"model": model, "optimizer": optimizer})
for epoch in saved.epochs(2):
    for x in [data, data]:
        model(x).sum().backward()
        optimizer.step()
duoka.save_weights(model, "weights.safetensors")
duoka.load_weights(model, "weights.safetensors")
duoka.predict(net, data)
"""


@pytest.mark.parametrize("used", [EVERY_MODULE, EVERY_FUNCTION], ids=["imported", "called"])
def test_duoka_draws_nothing(tmp_path: Path, used: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEEDED.format(used=used)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
