"""The rank of a process, for each way of starting it."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import threading
from typing import Any

import pytest

from duoka.errors import OptionError, TimedOut
from duoka.origins.origin import find_origin, reach_tcp_store
from duoka.planning.options import Machines
from tests.flows.flow import Flow
from tests.launchers.made import plan


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = ("SLURM_", "OMPI_", "PMI", "MPI_", "MASTER_", "TORCHELASTIC_")
    for name in list(os.environ):
        if name.startswith(prefixes) or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


TORCHRUN = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "TORCHELASTIC_RESTART_COUNT": 2}
SRUN = {"SLURM_PROCID": 5, "SLURM_LOCALID": 1, "SLURM_STEP_NUM_TASKS": 8, "SLURM_STEP_ID": 0, "SLURM_JOB_ID": 77}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 3, "OMPI_COMM_WORLD_LOCAL_RANK": 0}
MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2}


@pytest.mark.parametrize(
    ("variables", "kind", "ranks"),
    [
        ({}, "SingleProcess", (0, 1, 0)),
        (TORCHRUN, "Started", (3, 4, 1)),
        ({"RANK": 0, "WORLD_SIZE": 1}, "SingleProcess", (0, 1, 0)),
        (SRUN, "Started", (5, 8, 1)),
        (SRUN | {"SLURM_STEP_ID": ""}, "SingleProcess", (0, 1, 0)),
        ({"SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_JOB_ID": 3}, "SingleProcess", (0, 1, 0)),
        (OPEN_MPI, "Started", (2, 3, 0)),
        (MPICH, "Started", (1, 2, 1)),
        (SRUN | TORCHRUN, "Started", (3, 4, 1)),
    ],
    ids=str,
)
def test_who_started_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], kind: str, ranks: tuple[int, int, int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    origin = find_origin()
    assert type(origin).__name__ == kind
    assert (origin.rank, origin.world_size, origin.local_rank) == ranks


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": 1, "WORLD_SIZE": 2}, "LOCAL_RANK must be set"),
        ({"RANK": 1}, "WORLD_SIZE and LOCAL_RANK must be set where RANK is"),
        ({"RANK": 4, "WORLD_SIZE": 4, "LOCAL_RANK": 0}, "the rank set by torchrun must be from 0 to 3, but is 4"),
    ],
)
def test_surroundings_that_contradict_themselves(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OptionError, match=text):
        find_origin()


@pytest.mark.parametrize(
    "variables", [TORCHRUN, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": 1}], ids=["torchrun", "mpi"]
)
def test_no_address_is_given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OptionError, match="MASTER_ADDR and MASTER_PORT must be set"):
        find_origin().store(5.0)


def test_ranks_of_one_machine_know_who_started_them(flow: Flow) -> None:
    """A process of MPI's, with a shell between it and one of the ranks."""
    rank = flow.write("rank.py", "from duoka.engines import _starter\nprint(_starter())\n")
    starter = flow.write(
        "hydra_pmi_proxy.py",
        f"""
        import ctypes, subprocess, sys
        ctypes.CDLL(None).prctl(15, b"hydra_pmi_proxy", 0, 0, 0)  # PR_SET_NAME
        for command in ([sys.executable, "{rank}"], ["sh", "-c", "{sys.executable} {rank}; true"]):
            subprocess.run(command, check=True)
        """,
    )
    one, other = flow.python([starter]).ok().stdout.splitlines()
    assert one == other
    assert one.startswith("hydra_pmi_proxy ")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OptionError, match="MASTER_PORT must be a free port"):
            reach_tcp_store(0, "127.0.0.1", port, 2.0, is_master=True)


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TimedOut, match=f"rank 1 gave up waiting for rank 0 at 127.0.0.1:{port}"):
        reach_tcp_store(1, "127.0.0.1", port, 1.0, is_master=False)


def test_a_rank_that_does_not_come() -> None:
    from torch.distributed import HashStore

    from duoka.origins.origin import connect

    with pytest.raises(TimedOut, match=r"rank 0 waited 0\.2 s for ranks that did not connect: 1"):
        connect(HashStore(), 0, 2, 0.2)


def met() -> dict[int, Any]:
    """Connect two ranks, as threads; return what they share, and the sum of what they send."""
    import torch
    from torch.distributed import HashStore

    from duoka.origins.origin import Communication, connect

    store, found = HashStore(), {}

    def rank(number: int) -> None:
        communication: Communication = connect(store, number, 2, 20.0)
        ranks = communication.collectives(number, 2, 20.0, 0)
        found[number] = (
            communication.here,
            communication.exchange is not None,
            ranks.all_reduce(torch.ones(2) + number).tolist(),
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_one_machine_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # put back afterwards
    before = set(os.listdir("/dev/shm"))
    assert met() == {0: (2, True, [3, 3]), 1: (2, True, [3, 3])}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("duoka-")]


def test_ranks_of_several_machines_have_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("duoka.origins.origin.machine_name", lambda: secrets.token_hex(8))
    assert met() == {0: (1, False, [3, 3]), 1: (1, False, [3, 3])}


def test_no_room_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def full(**how: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    assert met() == {0: (2, False, [3, 3]), 1: (2, False, [3, 3])}


def test_ranks_of_several_commands_on_one_machine_have_no_common_status_board() -> None:
    """As under `srun -n 2 duoka run`: they compare their collectives in messages."""
    import torch

    from duoka.collectives.process import MultiHostCollectives
    from duoka.origins.origin import Forked
    from duoka.supervision.status_board import StatusBoard
    from duoka.system.environment import RankInfo

    store, found = os.memfd_create("store"), {}
    both = plan(machines=Machines(2, 0, "127.0.0.1", 1))

    def rank(number: int) -> None:
        info = RankInfo(number, 2, 0, 0, "id", here=2, file=store)
        origin = Forked(number, 2, number, both, info, StatusBoard.create(1, number).slot(number), None, "cpu")
        communication = origin.connect(20.0)
        ranks = communication.collectives(number, 2, 20.0, 0)
        total = ranks.all_reduce(torch.ones(2) + number).tolist()
        found[number] = communication.here, isinstance(ranks, MultiHostCollectives), total

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(store)
    assert found == dict.fromkeys(range(2), (2, True, [3.0, 3.0]))
