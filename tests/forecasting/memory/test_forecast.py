"""Forecasts of scripts whose memory is counted by hand."""

from __future__ import annotations

import json
from typing import Any

from tests.flows.flow import Flow

# 250,000 numbers in each of four layers; the loader's batches and what is computed of them are small.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(64, 500)), batch_size=8):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    open("made.txt", "w").close()
"""
LAYER = 4 * 500 * 500


def found(flow: Flow, *words: str, source: str = SCRIPT) -> dict[str, Any]:
    flow.write("train.py", source)
    words = ("forecast", "--memory", "--json", "--threads", "1", "--devices", "cpu:2", *words, "train.py")
    result = flow.run([*words], timeout=100).ok()
    assert [path.name for path in flow.folder.iterdir()] == ["train.py"]
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_what_a_device_holds(flow: Flow) -> None:
    data = found(flow, "--device-memory", "10MB")
    assert data["batch"] == 8
    state = data["one_device"]["the optimizer's state"]
    assert data["one_device"]["parameters"] == data["one_device"]["gradients"] == 4 * LAYER
    assert 8 * LAYER <= state < 8 * LAYER + 100  # and the number of the step
    single, ddp, fsdp, _ = (layout["peak"] for layout in data["layouts"])
    kept = 4 * 64 * 500  # the data, and rows
    # Adam's step needs temporary memory for one parameter.
    assert 17 * LAYER < single < 19 * LAYER + 2 * kept, data
    # All gradients are in a bucket at the end of the backward pass.
    assert 20 * LAYER < ddp < 21 * LAYER + 2 * kept, data
    # Half of them; the next block whole; gradients of a block that are sent, and what is received, of two.
    assert 12.5 * LAYER < fsdp < 14 * LAYER, data
    assert data["take"] is None, data


def test_fsdp_where_only_that_fits(flow: Flow) -> None:
    data = found(flow, "--device-memory", "17MB", "--machines", "2")
    assert data["take"] == {"strategy": "hsdp", "devices": 4, "checkpoint_activations": False}
    two, (_, hsdp, fsdp, *_) = data["layouts"][:3], data["layouts"][3:]
    assert [(one["strategy"], one["fits"]) for one in two] == [("ddp", False), ("fsdp", True), ("fsdp", True)]
    assert hsdp["fits"]
    assert 0 <= two[1]["peak"] - hsdp["peak"] < 4 * 64 * 500  # as much of the model, and half of the rows
    assert fsdp["peak"] < 0.8 * hsdp["peak"]
    assert "ddp needs 2" in data["verdict"]
    assert "fsdp on cpu:2 on each of 2 machines, " in data["verdict"].replace("hsdp", "fsdp")


def test_a_script_that_makes_no_second_step(flow: Flow) -> None:
    flow.write("train.py", SCRIPT.replace("randn(64", "randn(8"))
    result = flow.run(["forecast", "--memory", "--devices", "cpu:2", "train.py"], timeout=100)
    assert result.returncode == 1
    assert "the script ended after one step, and memory is calculated from the second step on" in result.stderr
