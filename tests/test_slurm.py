"""What is made of Slurm's variables."""

from __future__ import annotations

import os

import pytest

from duoka import slurm
from duoka.errors import OptionError
from duoka.options import ONE_MACHINE, Machines
from duoka.slurm import first_node

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_PROCID": "1",
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER"))}
    )


def test_a_task_for_each_machine_is_a_run_of_all() -> None:
    os.environ.update(STEP)
    port = 20_000 + (77 * 16 + 2) % 12_000
    assert slurm.machines() == Machines(2, 1, "gpu003", port, told_by="Slurm")


def test_where_to_meet_may_be_told() -> None:
    os.environ.update(STEP, MASTER_ADDR="node9", MASTER_PORT="29500")
    assert slurm.machines().place == "node9:29500"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        STEP | {"SLURM_STEP_ID": ""},  # in salloc
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_a_single_task_is_a_run_of_its_own(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    assert slurm.machines() is ONE_MACHINE


@pytest.mark.parametrize(("nodes", "given"), [("1", "8 on 1 machine'"), ("2", "8 on 2 machines'")])
def test_several_tasks_on_a_machine_are_too_many(nodes: str, given: str) -> None:
    os.environ.update(STEP, SLURM_STEP_NUM_TASKS="8", SLURM_STEP_NUM_NODES=nodes)
    with pytest.raises(OptionError) as error:
        slurm.machines()
    assert f"must be one for each machine, whose workers duoka starts, but is '{given}" in str(error.value)
    assert "--machines 1 makes each task a run of its own" in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-005,9],cpu1", "gpu003"),
        ("rack-2-node[12,14]-ib,x", "rack-2-node12-ib"),
        ("n[1-2].cluster", "n1.cluster"),
    ],
)
def test_the_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_list_without_nodes() -> None:
    with pytest.raises(OptionError, match="or set MASTER_ADDR"):
        first_node("[1-2]")
