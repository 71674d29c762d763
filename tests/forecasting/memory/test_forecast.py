"""Forecasts of scripts whose memory is counted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duoka.forecasting.memory import as_data, as_text, choice, doubts, in_bytes, verdict
from tests.flows.flow import Flow
from tests.forecasting.memory.made import MB, Story, forecast

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
    # Half of them; two blocks and half of a third; gradients of one, which are sent, and what is received.
    assert 12.5 * LAYER < fsdp < 14 * LAYER, data
    assert data["take"] is None, data


def test_fsdp_where_only_that_fits(flow: Flow) -> None:
    data = found(flow, "--device-memory", "17MB", "--machines", "2")
    assert data["take"] == {"strategy": "hsdp", "devices": 4, "checkpoint_activations": False, "cpu_offload": False}
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


def story(batch: int | None = 8) -> Story:
    made = Story(batch)
    made.alive(20, "state", 0)
    for block in range(2):
        made.alive(5, "parameter", block)
    for block in range(2):
        made.make(5, "gradient", block)
    made.make(40, "rows")
    made.begin("step")
    return made


# On one device 80 MB; with ddp on two 60, on four 50.
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (1000, "ddp on cpu:4, 50 MB of each device; cpu:1 is enough"),
        (70, "ddp on cpu:4, 50 MB of each device; cpu:2 is enough"),
        (10, "nothing fits on cpu:4: the least is"),
    ],
)
def test_the_verdict(limit: int, said: str) -> None:
    assert verdict(forecast(story(), [limit * MB] * 3)).startswith(said)


def test_fsdp_where_ddp_does_not_fit() -> None:
    found = forecast(story(), [55 * MB] * 3)
    said = verdict(found)
    assert said.startswith("fsdp on cpu:4, ")
    assert "(ddp needs 50 MB, more than 90% of its 55 MB)" in said


def test_more_devices_where_nothing_fits() -> None:
    assert "; 8 devices of this size are enough, with fsdp" in verdict(forecast(story(), [44 * MB] * 3))
    assert "; more devices are not enough: use a smaller batch" in verdict(forecast(story(), [10 * MB] * 3))


def test_the_choice_of_a_run() -> None:
    found = forecast(story(), [54 * MB], devices=(4,))
    need = found.advice(4)
    assert need is not None
    said = choice(found, need)
    assert said.startswith("--strategy auto: fsdp needs "), said
    assert said.endswith("of each device's 54 MB (ddp needs 50 MB, more than 90% of its 54 MB)")


def test_one_step_is_enough_to_choose_ddp() -> None:
    made = story()
    made.steps, made.bound = 1, 70 * MB
    found = forecast(made, [100 * MB], devices=(2,))
    need = found.advice(2)
    assert need is not None
    assert choice(found, need) == "--strategy auto: ddp needs at most 70 MB of each device's 100 MB"


def test_the_table_and_the_data_say_the_same() -> None:
    found = forecast(story(), [1000 * MB, None, 10 * MB])
    text = as_text(found, "normal").splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text if line.startswith("│")]
    data = json.loads(as_data(found))
    assert [row[:2] for row in rows[:3]] == [["cpu:1", "single"], ["cpu:2", "ddp"], ["cpu:2", "fsdp"]]
    assert [row[2] for row in rows] == [in_bytes(one["peak"]) for one in data["layouts"]]
    assert [row[3:] for row in rows[:2]] == [["1 GB", "yes"], ["not known", ""]]
    assert all(row[3:] == ["10 MB", "no"] for row in rows[-3:])
    assert data["take"] is None
    assert data["one_device"]["parameters"] == 10 * MB
    assert text[-1] == f"verdict: {verdict(found)}" == as_text(found, "quiet")


@pytest.mark.parametrize(("batch", "said"), [(None, "no model was called"), (3, "a batch of 3 is computed whole")])
def test_doubts(batch: int | None, said: str) -> None:
    assert next(doubts(forecast(story(batch), [None] * 3))).startswith(said)


@pytest.mark.parametrize(
    ("size", "text"), [(1234, "1.23 kB"), (12.34e6, "12.3 MB"), (997.3e6, "997 MB"), (80e9, "80 GB")]
)
def test_sizes(size: float, text: str) -> None:
    assert in_bytes(size) == text
