"""What is around the measuring: what is kept of it, and that scripts for GPUs run (here on CPUs)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks import results
from benchmarks.machine import Machine
from benchmarks.results import Measured
from benchmarks.runs import SCRIPTS, Samples, in_turn
from benchmarks.table import Finding, Row, show
from tests.flows.flow import Flow

ROW = Row("a step", Samples((1.0, 2.0, 9.0), "ms"), Samples((2.0, 2.0, 3.0), "ms"), bar=1.2)


def test_each_is_a_file_that_measures_and_says_what() -> None:
    for home in benchmarks.BENCHMARKS.values():
        module = import_module(home)
        assert callable(module.measure)
        assert module.__doc__


def test_a_ratio_is_that_of_medians_and_its_spread_that_of_rounds() -> None:
    assert (ROW.ratio, ROW.spread, ROW.holds) == (1.0, (0.5, 3.0), True)
    more = Row("a step", ROW.this, Samples((4.0,), "ms"))
    assert (more.ratio, more.spread, more.holds) == (0.5, (0.25, 2.25), True)
    assert not Row("a step", ROW.this, ROW.against, bar=0.9).holds


def test_the_first_round_warms_up_and_then_all_are_measured_in_turn() -> None:
    calls: list[str] = []
    contestants = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    times = in_turn(contestants, 2, "s")
    assert "".join(calls) == "ababab"
    assert times["a"].values == (3.0, 5.0)
    assert in_turn(contestants, 1, "s", warm_up=False)["a"].values == (7.0,)


def test_what_was_measured_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    finding = Finding("103 samples", "duoka", "103 / 103")
    results.write({"step": Measured.now(1.0, [ROW]), "same_result": Measured.now(2.0, [finding])})
    path = results.write({"step": Measured.now(3.0, [ROW, ROW])})  # measured again: the others stay
    (found,) = results.read_all()
    assert path.name == f"{found.machine.name}.json"
    assert found.row("a step") == ROW
    assert found.row("no such row") is None
    assert list(found.benchmarks["same_result"].found) == [finding]
    assert (found.benchmarks["step"].seconds, len(found.benchmarks["step"].found)) == (3.0, 2)
    assert "torch" in found.benchmarks["step"].versions


def test_names_of_machines() -> None:
    assert Machine("Intel Xeon", 2, 24, (), "Linux").name == "intel-xeon-2-cores"
    assert Machine("Intel Xeon", 16, 128, ("NVIDIA H200",) * 8, "Linux").name == "nvidia-h200-x8"


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show([ROW, Finding("103 samples", "duoka", "102", holds=False)])
    printed = capsys.readouterr().out
    assert "a step  2 ms [1-9]  2 ms [2-3]  1.00   1.20  holds" in printed
    assert "103 samples  duoka  102  MISSED" in printed


@pytest.mark.parametrize("how", ["plain", "dp", "ddp"])
def test_the_step_for_gpus_runs_on_two_workers(flow: Flow, how: str) -> None:
    kind = "distributed" if how == "ddp" else "plain"
    words = ["--devices", "cpu:2", "--kind", kind, SCRIPTS / "cuda_step.py", "mlp", how]
    result = flow.run(["run", "--quiet", *words], env={"STEPS": "2"}).ok()
    assert float(result.stdout) > 0


@pytest.mark.parametrize("who", ["duoka", "torch"])
def test_the_loading_for_gpus_runs(flow: Flow, who: str) -> None:
    assert float(flow.python([SCRIPTS / "cuda_loading.py", who], env={"STEPS": "2"}).ok().stdout) > 0


@pytest.mark.parametrize("how", ["", "ddp"])
def test_the_models_of_many_functions_run_on_two_workers(flow: Flow, how: str) -> None:
    kind = "distributed" if how else "plain"
    words = ["--devices", "cpu:2", "--kind", kind, SCRIPTS / "host.py", "gpt-dropout", *how.split()]
    result = flow.run(["run", "--quiet", *words], env={"ROUNDS": "1"}).ok()
    assert all(float(word) > 0 for word in result.stdout.split())
    assert len(result.stdout.split()) == 5
