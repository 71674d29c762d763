"""What `duoka.ray.launch` computes and checks without Ray."""

from __future__ import annotations

import sys

import pytest

from duoka.errors import OptionError, WorkerFailed
from duoka.ray import CommandResult, Job, launch, resources, results


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("auto", {"CPU": 1, "GPU": 1}),
        (2, {"CPU": 2, "GPU": 2}),
        ("8", {"CPU": 8, "GPU": 8}),
        ("cpu", {"CPU": 1}),
        ("cpu:3", {"CPU": 3}),
    ],
)
def test_a_node_has_a_cpu_and_a_gpu_for_each_worker(devices: str | int, expected: dict[str, float]) -> None:
    assert resources(devices) == expected


@pytest.mark.parametrize("devices", ["0,3", "cuda", "free:2", "mps", "GPU-3c1a"])
def test_devices_that_ray_chooses_are_not_named(devices: str) -> None:
    with pytest.raises(OptionError, match="Ray chooses the GPUs of each node"):
        resources(devices)


def test_the_command_of_a_node() -> None:
    job = Job(("train.py", "--lr", "1"), b"", ".", {"CPU": 2, "GPU": 2})
    base = [sys.executable, "-m", "duoka", "run", "--devices", "gpu"]
    assert job.command(0, 1, "h:1") == [*base, "--machines", "1", "train.py", "--lr", "1"]
    several = ["--machines", "3", "--machine", "2", "--rendezvous", "h:1"]
    assert job.command(2, 3, "h:1") == [*base, *several, "train.py", "--lr", "1"]
    assert Job((), b"", ".", {"CPU": 4}).command(0, 1, "")[5] == "cpu:4"


def test_results_are_in_the_order_of_ranks() -> None:
    ends = [CommandResult(1, 0, {2: b"c", 3: b"d"}), CommandResult(0, 0, {1: b"b", 0: b"a"})]
    assert results(ends) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (
            [CommandResult(0, 1, host="a"), CommandResult(1, 1, error="boom", host="b")],
            "duoka run on node 1 (b) ended with .*boom",
        ),
        (
            [CommandResult(0, 1, host="a"), CommandResult(1, 1, lost="killed")],
            "Ray has lost the command on node 1: killed",
        ),
        (
            [CommandResult(0, 0, {0: b"a"}), CommandResult(1, 3, host="b")],
            "node 1 (b) ended with exit code 3; its report",
        ),
    ],
)
def test_the_error_names_the_cause(ends: list[CommandResult], expected: str) -> None:
    with pytest.raises(WorkerFailed, match="(?s)" + expected.replace("(b)", r"\(b\)")):
        results(ends)


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": "2"}, {"retries": -1}, {"devices": "0,1"}])
def test_wrong_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        launch(print, **wrong)  # type: ignore[arg-type]


def test_a_script_takes_words_alone() -> None:
    with pytest.raises(OptionError, match="left out for a script"):
        launch("train.py", epochs=3)
