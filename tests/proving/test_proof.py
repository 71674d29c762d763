from __future__ import annotations

import json
import math
import signal
import time
from typing import Any

import pytest

from duoka.proving.comparing import RunComparison
from duoka.proving.proof import begins_alike
from tests.flows.flow import Flow, Result
from tests.proving import scripts


def prove(flow: Flow, source: str, *words: str, name: str = "train.py", **how: Any) -> Result:
    flow.write(name, source)
    temporary = flow.folder.parent / f"{flow.folder.name}-tmp"
    temporary.mkdir(exist_ok=True)
    result = flow.run(["prove", *words, name], env={"TMPDIR": str(temporary)}, timeout=100, **how)
    assert list(temporary.glob("duoka-prove*")) == []  # also of earlier proofs that were killed
    return result


def data(flow: Flow, source: str, *words: str) -> tuple[int, dict[str, Any]]:
    result = prove(flow, source, "--json", *words)
    assert result.stdout.startswith("{"), result
    return result.returncode, json.loads(result.stdout)


def test_a_right_script_is_equal_to_rounding(flow: Flow) -> None:
    result = prove(flow, scripts.RIGHT, "--devices", "cpu:2", "--steps", "6", "--report", "proof.html")
    assert result.returncode == 0, result
    text = (flow.folder / "proof.html").read_text()
    assert "train.py: equal to rounding, as wanted" in text
    assert "<h2>cpu:2: differences from python</h2>" in text
    assert "<h2>cpu:2: loss</h2>" in text
    assert "verdict: equal to rounding, as wanted" in result.stdout
    assert "model.1.running_var" in result.stdout
    assert not (flow.folder / "model.pt").exists()


def test_one_device_has_the_bits_of_python(flow: Flow) -> None:
    temporary = flow.folder.parent / f"{flow.folder.name}-tmp"
    (temporary / "duoka-prove-4194304").mkdir(parents=True)  # of a killed proof: no process has this number
    code, found = data(flow, scripts.RIGHT, "--devices", "cpu:1", "--threads", "2", "--want", "bits", "--steps", "3")
    assert (code, found["verdict"], found["holds"]) == (0, "bits", True)
    assert found["sides"][0]["data"] is None


def test_parameters_of_which_each_rank_has_a_part(flow: Flow) -> None:
    code, found = data(flow, scripts.RIGHT, "--devices", "cpu:2", "--strategy", "fsdp", "--steps", "3")
    assert (code, found["verdict"], found["sides"][0]["steps"]) == (0, "rounding", 3)


def test_bits_that_are_wanted_and_not_there(flow: Flow) -> None:
    code, found = data(flow, scripts.RIGHT, "--devices", "cpu:2", "--want", "bits", "--steps", "3")
    assert (code, found["verdict"]) == (1, "rounding")
    assert "another order" in found["sides"][0]["cause"]


@pytest.mark.parametrize(
    ("source", "words", "cause"),
    [
        (scripts.RIGHT, ["--batch-norm", "local"], "--batch-norm local: BatchNorm takes"),
        (scripts.RIGHT, ["--randomness", "worker"], "--randomness worker: each rank draws"),
        (scripts.AUGMENTED, ["--loading", "shared"], "--loading shared: random augmentation is seeded by sample"),
        (scripts.MIXING, ["--row-independent", "Centred"], "--row-independent Centred: a function that it"),
        (scripts.UNSEEDED, [], "each time it is run: model.0.weight is another before the first step"),
        (scripts.SHUFFLED_BY_TIME, [], "each time it is run: it is given other data in step 1"),
        (scripts.NOISY, [], "a kernel is not deterministic"),
    ],
    ids=["batch norm", "randomness", "augmentation", "rows that mix", "process id", "time", "kernel"],
)
def test_a_wrong_script_is_told_with_its_cause(flow: Flow, source: str, words: list[str], cause: str) -> None:
    code, found = data(flow, source, "--devices", "cpu:2", "--steps", "3", *words)
    run = found["sides"][0]
    assert (code, run["verdict"]) == (1, "different"), run
    assert cause in run["cause"]


def test_ranks_with_data_of_their_own(flow: Flow) -> None:
    code, found = data(flow, scripts.BY_RANK, "--devices", "cpu:2", "--steps", "2")
    run = found["sides"][0]
    assert (code, run["verdict"], found["first"]) == (1, "different", "one rank")
    assert (run["first"]["step"], run["first"]["tensor"]) == (1, "model.weight")
    assert "8 and 16 rows" in run["cause"]


def test_the_first_devices_are_what_the_others_are_compared_with(flow: Flow) -> None:
    words = ["--devices", "cpu:2", "--devices", "cpu:2", "--devices", "cpu:3", "--want", "rounding", "--steps", "2"]
    code, found = data(flow, scripts.RIGHT, *words)
    assert (code, found["first"]) == (0, "cpu:2")
    assert [(run["name"], run["verdict"]) for run in found["sides"]] == [("cpu:2", "bits"), ("cpu:3", "rounding")]


SCALE = "optimizer 1 group 0 parameter 2"  # of no model


@pytest.mark.parametrize(
    ("source", "steps", "tensors"),
    [
        (scripts.GAN, 6, {"G.weight", "G.bias", "D.0.weight", "D.0.bias", "D.2.weight", "D.2.bias", SCALE}),
        (scripts.LBFGS, 2, {"net.weight", "net.bias"}),
    ],
    ids=["gan", "lbfgs"],
)
def test_several_optimizers_and_closures(flow: Flow, source: str, steps: int, tensors: set[str]) -> None:
    code, found = data(flow, source, "--devices", "cpu:2", "--steps", "6")
    run = found["sides"][0]
    assert (code, run["verdict"], run["steps"]) == (0, "rounding", steps), run
    names = {gap["tensor"].removeprefix("gradient of ") for gap in run["gaps"]}
    assert names
    assert names <= tensors, names


def test_what_a_script_writes_is_not_there_afterwards(flow: Flow) -> None:
    for name, text in (("kept.txt", "mine"), ("gone.txt", ""), ("old/inside.txt", "old")):
        flow.write(name, text)
    result = prove(flow, scripts.STUBBORN, "--devices", "cpu:2", "--steps", "2", name="stubborn.py")
    assert result.returncode == 0, result
    left = {str(path.relative_to(flow.folder)): path.read_text() for path in flow.folder.rglob("*.txt")}
    assert left == {"kept.txt": "mine", "gone.txt": "", "old/inside.txt": "old"}
    assert not (flow.folder / "out").exists()


def test_a_script_that_fails_on_one_side_only(flow: Flow) -> None:
    source = scripts.RIGHT + "\nassert torch.get_num_threads() > 1, 'one thread is too few'\n"
    result = prove(flow, source, "--devices", "cpu:2", "--steps", "100")
    assert result.returncode == 1
    assert "AssertionError: one thread is too few" in result.stderr
    assert "duoka: error: cpu:2: the script failed after step 15" in result.stderr


def test_a_script_that_fails_by_itself(flow: Flow) -> None:
    result = prove(flow, "import torch\n1 / 0\n", "--devices", "cpu:2")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "duoka: error: python: the script failed before its first step" in result.stderr


def test_a_script_that_makes_no_step(flow: Flow) -> None:
    result = prove(flow, "import torch\nprint(torch.ones(1))\n", "--devices", "cpu:2")
    assert result.returncode == 1
    assert "without a step of an optimizer" in result.stderr
    assert result.stdout == ""


def test_ctrl_c_leaves_nothing_behind(flow: Flow) -> None:
    flow.write("slow.py", scripts.RIGHT + "\nimport time\ntime.sleep(100)\n")
    temporary = flow.folder / "tmp"
    temporary.mkdir()
    words = ["prove", "--devices", "cpu:2", "--steps", "1000", "slow.py"]
    running = flow.start(words, env={"TMPDIR": str(temporary)})
    deadline = time.monotonic() + 60
    while not list(temporary.glob("duoka-prove*/*/seen/steps.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130, result
    assert "duoka: interrupted" in result.stderr
    assert list(temporary.glob("duoka-prove*")) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--want", "bit"], "did you mean bits?"),
        (["--steps", "0"], "--steps must be a whole number from 1"),
        (["--devices", "cpu:0"], "cpu:0"),
        (["--seed", "-1"], "--seed must be"),
    ],
)
def test_what_cannot_be_asked_for(flow: Flow, words: list[str], text: str) -> None:
    result = prove(flow, scripts.RIGHT, *words)
    assert result.returncode == 2
    assert text in result.stderr


def test_recording_changes_no_bit(flow: Flow) -> None:
    script = flow.write("telling.py", scripts.TELLING)
    for devices in ("cpu:1", "cpu:2"):
        run = flow.run(["run", "-q", "--devices", devices, script]).ok().stdout.splitlines()
        words = ["-q", "--steps", "7", "--log-dir", "logs", "--devices", devices]
        prove(flow, scripts.TELLING, *words, name="telling.py").ok()
        hashes = [line for line in run if len(line) == 64]
        logged = (flow.folder / "logs" / devices / "rank0.log").read_text().splitlines()
        assert [line for line in logged if len(line) == 64] == hashes[:6]  # the seventh step ends it
    assert len(hashes) == 10


@pytest.mark.parametrize(
    ("source", "noise"),
    [(scripts.API, {"model.0.bias"}), pytest.param(scripts.MODERN, {"net.0.bias"}, marks=pytest.mark.long)],
    ids=["api", "modern"],
)
def test_a_bias_before_a_normalisation_is_noise(flow: Flow, source: str, noise: set[str]) -> None:
    code, found = data(flow, source, "--devices", "cpu:2", "--steps", "4")
    assert (code, found["verdict"], found["steps"]) == (0, "rounding", 4), found
    assert found["sides"][0]["data"] is None
    assert noise <= {gap["tensor"] for gap in found["sides"][0]["gaps"] if gap["relative"] > 1e-3}


def test_sharded_models_are_put_together(flow: Flow) -> None:
    _, found = data(flow, scripts.SHARDED, "--devices", "cpu:2", "--steps", "2")
    gaps = found["sides"][0]["gaps"]
    assert all(gap["problem"] == "" and gap["absolute"] < 1e-6 for gap in gaps), gaps


@pytest.mark.parametrize(
    ("source", "text"),
    [(scripts.WIDER, "model.0.weight is [8, 6] float32 and [9, 6] float32"), (scripts.SHORTER, "steps were made")],
    ids=["shapes", "steps"],
)
def test_runs_that_are_not_of_one_shape(flow: Flow, source: str, text: str) -> None:
    result = prove(flow, source, "--devices", "cpu:2", "--steps", "12")
    assert result.returncode == 1
    assert text in result.stdout, result


@pytest.mark.parametrize("source", [scripts.RIGHT, scripts.API], ids=["plain", "api"])
def test_exact_has_the_same_bits_on_any_number_of_devices(flow: Flow, source: str) -> None:
    words = ["--strategy", "exact", "--shares", "4", "--want", "bits", "--steps", "4"]
    code, found = data(flow, source, *words, "--devices", "cpu:1", "--devices", "cpu:2", "--devices", "cpu:4")
    assert (code, [run["verdict"] for run in found["sides"]]) == (0, ["bits", "bits"]), found


def test_exact_is_python_to_rounding(flow: Flow) -> None:
    result = prove(flow, scripts.RIGHT, "--strategy", "exact", "--steps", "4", "--devices", "cpu:2")
    assert result.returncode == 0, result
    assert "running python, added up in 2 parts" in result.stderr


def test_a_wrong_gradient_is_found_though_adam_makes_the_same_step_of_it(flow: Flow) -> None:
    code, found = data(flow, scripts.SCALED_GRADIENT, "--devices", "cpu:2", "--row-independent", "Scaled")
    run = found["sides"][0]
    assert (code, run["verdict"]) == (1, "different")
    assert (run["first"]["step"], run["first"]["tensor"]) == (1, "gradient of model.weight")
    assert run["largest"]["relative"] < 1e-4
    assert found["sides"][0]["cause"].startswith("--row-independent Scaled")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ((2.0, 1.0), (2.001, 3.0), True),  # what comes later is the script's own doing
        ((2.0, 1.0), (2.2, 1.0), False),
        ((0.0,), (0.0,), True),
        ((math.nan,), (math.nan,), True),
        ((), (), True),
    ],
)
def test_a_run_whose_first_loss_is_another_shows_no_rounding(
    one: tuple[float, ...], other: tuple[float, ...], alike: bool
) -> None:
    assert begins_alike(RunComparison((), (2, 2), None, (one, other))) is alike
