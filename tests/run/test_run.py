"""Scripts that use the API, in real processes: the numbers of the plain loop on one device, however started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result, Warm
from tests.flows.test_same_result import assert_same_lines, assert_same_weights

LOOP = Path(__file__).parent / "scripts" / "loop.py"
CASES = [("103", "shuffled"), ("96", "in-order")]


@pytest.fixture(scope="module")
def reference(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Result, Path]]:
    """What the plain loop gives, once for each case."""
    done: dict[tuple[str, str], tuple[Result, Path]] = {}

    def run(*case: str) -> tuple[Result, Path]:
        if case not in done:
            folder = tmp_path_factory.mktemp("plain")
            saved = folder / "weights.pt"
            done[case] = Flow(warm, folder).python([LOOP, "plain", *case, saved]).ok(), saved  # type: ignore[index]
        return done[case]  # type: ignore[index]

    return run


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_same_result(
    flow: Flow, reference: Callable[..., tuple[Result, Path]], case: tuple[str, str], workers: int
) -> None:
    expected, weights = reference(*case)
    saved = flow.folder / "weights.pt"
    result = flow.run(["run", "--devices", f"cpu:{workers}", LOOP, "api", *case, saved]).ok()
    assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, saved)


def test_it_works_alone(flow: Flow, reference: Callable[..., tuple[Result, Path]]) -> None:
    expected, _ = reference(*CASES[0])
    saved = flow.folder / "weights.pt"
    assert flow.python([LOOP, "api", *CASES[0], saved]).ok().stdout == expected.stdout


def variables(name: str, rank: int, port: int) -> dict[str, str]:
    """What a launcher tells one of two processes."""
    told = {
        "torchrun": {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"},
        "srun": {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_ID": 0, "MASTER_ADDR": "localhost"},
        "mpirun": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank},
        "mpiexec": {"PMI_RANK": rank, "PMI_SIZE": 2, "MASTER_ADDR": "localhost"},
    }[name]
    return {key: str(value) for key, value in (told | {"MASTER_PORT": port, "PMIX_NAMESPACE": port}).items()}


@pytest.mark.parametrize("name", ["torchrun", "srun", "mpirun", "mpiexec"])
def test_it_works_under_any_launcher(flow: Flow, reference: Callable[..., tuple[Result, Path]], name: str) -> None:
    expected, weights = reference(*CASES[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    args = [LOOP, "api", *CASES[1], flow.folder / "weights.pt"]
    ranks = [flow.start(args, program="python", env=variables(name, rank, port)) for rank in range(2)]
    for result in [rank.wait().ok() for rank in ranks]:
        assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, flow.folder / "weights.pt")
