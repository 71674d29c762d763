"""Variables of each engine. Runs that real engines start are in tests/flows/test_engines.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from duoka import engines
from duoka.engines import first_node, idle_machines
from duoka.errors import OptionError
from duoka.planning.options import ONE_MACHINE, Machines

PREFIXES = (
    "SLURM",
    "OMPI_",
    "PMI",
    "MPI_",
    "MASTER_",
    "TORCHELASTIC_",
    "PET_",
    "JSM_",
    "LSB_",
    "KUBERNETES_",
    "JOB_",
)
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: text for name, text in os.environ.items() if not name.startswith(PREFIXES) and name not in NAMES}
    monkeypatch.setattr(os, "environ", kept)


def told(**variables: Any) -> Machines | None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    return engines.machines(None)


TORCHRUN = {
    "RANK": 3,
    "WORLD_SIZE": 4,
    "LOCAL_RANK": 1,
    "LOCAL_WORLD_SIZE": 2,
    "GROUP_WORLD_SIZE": 2,
    "MASTER_ADDR": "node1",
    "MASTER_PORT": 29400,
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": 1,
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": 77,
    "SLURM_STEP_ID": 2,
    "SLURM_STEP_NUM_TASKS": 8,
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": 1,
    "SLURM_PROCID": 5,
    "SLURM_LOCALID": 1,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 2,
    "OMPI_COMM_WORLD_SIZE": 3,
    "OMPI_COMM_WORLD_LOCAL_RANK": 2,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 3,
    "OMPI_MCA_orte_num_nodes": 1,
    "PMIX_NAMESPACE": "12",
}
ONE_EACH = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": 1, "SLURM_LOCALID": 0}
JSRUN = {
    "LSB_JOBID": 5,
    "JSM_NAMESPACE_RANK": 1,
    "JSM_NAMESPACE_SIZE": 2,
    "JSM_NAMESPACE_LOCAL_RANK": 1,
    "JSM_NAMESPACE_LOCAL_SIZE": 2,
    "MASTER_ADDR": "node1",
}
PYTORCH_JOB = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456}
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TRAIN_JOB = {
    "PET_NNODES": 2,
    "PET_NODE_RANK": 1,
    "PET_NPROC_PER_NODE": 4,
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": 29500,
}


@pytest.mark.parametrize(
    ("variables", "engine", "each", "number", "place"),
    [
        (TORCHRUN, "torchrun", "rank", "3 of 4, local 1 of 2", "node1:29400"),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "GROUP_WORLD_SIZE": 4},
            "torchrun",
            "machine",
            "3 of 4",
            "",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}, "torchrun", "rank", "3 of 4", ""),  # 3 on the other
        (SRUN, "Slurm", "rank", "5 of 8, local 1 of 4", f"gpu003:{20_000 + (77 * 16 + 2) % 12_000}"),
        (SRUN | ONE_EACH, "Slurm", "machine", "1 of 2", "gpu003:"),
        (
            SRUN | ONE_EACH | {"MASTER_ADDR": "node9", "MASTER_PORT": 29500},
            "Slurm",
            "machine",
            "1 of 2",
            "node9:29500",
        ),
        (SRUN | TORCHRUN, "torchrun", "rank", "3 of 4", ""),  # srun has started torchrun
        (SRUN | OPEN_MPI, "Open MPI", "rank", "2 of 3", ""),  # and here mpirun
        (SRUN | {"PMI_RANK": 5, "PMI_SIZE": 8}, "Slurm", "rank", "5 of 8", ""),  # srun --mpi=pmi2
        (OPEN_MPI, "Open MPI", "rank", "2 of 3, local 2 of 3", "127.0.0.1:"),
        ({"PMI_RANK": 1, "PMI_SIZE": 2, "PMI_ID": 1, "MASTER_ADDR": "a"}, "MPI", "rank", "1 of 2", "a:"),
        (JSRUN, "LSF", "rank", "1 of 2, local 1 of 2", "node1:"),
        (PYTORCH_JOB | IN_A_POD, "Kubernetes", "machine", "1 of 2", "job-master-0:23456"),
        (TRAIN_JOB, "Kubernetes", "machine", "1 of 2", "job-node-0-0.job:29500"),
        (TRAIN_JOB | TORCHRUN, "torchrun", "rank", "3 of 4", ""),  # a pod's command is torchrun
    ],
    ids=str,
)
def test_who_tells_what(variables: dict[str, Any], engine: str, each: str, number: str, place: str) -> None:
    machines = told(**variables)
    assert machines is not None
    assert (machines.engine, machines.each) == (engine, each)
    found = f"{machines.number} of {machines.count}, local {machines.local_rank} of {machines.here}"
    assert found.startswith(number)
    assert machines.rendezvous.startswith(place)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        SRUN | {"SLURM_STEP_ID": ""},  # in salloc
        SRUN | ONE_EACH | {"SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0, "SLURM_STEP_NUM_NODES": 1},
        TORCHRUN | {"DUOKA_RUN_ID": "job"},  # by a script that duoka itself has started
        {"RANK": 0, "WORLD_SIZE": 1},
        {"WORLD_SIZE": 1},
    ],
    ids=str,
)
def test_a_command_that_is_alone(variables: dict[str, Any]) -> None:
    assert told(**variables) is None


def test_each_may_be_a_run_of_its_own() -> None:
    os.environ.update({name: str(value) for name, value in SRUN.items()})
    assert engines.machines(1) is ONE_MACHINE


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": 1, "WORLD_SIZE": 2}, "LOCAL_RANK must be set where RANK and WORLD_SIZE is, but is missing"),
        ({"WORLD_SIZE": 4}, "RANK and LOCAL_RANK must be set where WORLD_SIZE is, but is missing"),
        (TORCHRUN | {"RANK": 4}, "the rank set by torchrun must be from 0 to 3, but is 4"),
        (TORCHRUN | {"LOCAL_RANK": 2}, "the local rank set by torchrun must be one of those of its machine"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": 5}, "must be at least one for each machine, but is '4 on 5 machines'"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": 1, "OMPI_COMM_WORLD_LOCAL_RANK": 0},
            "MASTER_ADDR and MASTER_PORT",
        ),
        (TRAIN_JOB | {"PET_NNODES": "1:3"}, "PET_NNODES must be one number, but is '1:3'; torchrun -m duoka run"),
        ({"JOB_COMPLETION_INDEX": 1}, "--machines must be given in a pod of an Indexed Job, but is missing"),
        (SRUN | {"SLURM_STEP_NODELIST": "[1-2]"}, "or set MASTER_ADDR"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(variables: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as error:
        told(**variables)
    assert text in str(error.value)
    assert "MASTER_ADDR" in text or "--machines 1" in str(error.value) or "torchrun -m" in str(error.value)


def test_a_pod_of_an_indexed_job_reaches_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ["JOB_COMPLETION_INDEX"] = "11"
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-11.train.default.svc.cluster.local")
    machines = engines.machines(12)
    assert machines is not None
    assert (machines.number, machines.rendezvous) == (11, "train-0.train.default.svc.cluster.local:29500")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-11")
    with pytest.raises(OptionError, match="headless service"):
        engines.machines(12)


def test_where_lsf_starts_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("batch\nnode7\nnode7\nnode8\nnode8\n")
    more = {"LSB_DJOB_RANKFILE": tmp_path / "ranks", "MASTER_ADDR": "", "JSM_NAMESPACE_SIZE": 4}
    machines = told(**JSRUN | more)
    assert machines is not None
    assert (machines.host, machines.each) == ("node7", "rank")


def test_machines_that_a_batch_script_leaves_idle() -> None:
    os.environ.update(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2")
    assert idle_machines() == 1
    os.environ["SLURM_STEP_ID"] = "0"
    assert idle_machines() == 0


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
