from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import simulated
from tests.flows.flow import Flow, Warm, WarmServer, surroundings
from tests.flows.warm import make_forks_cheap

SERVERS = pytest.StashKey[dict[str, WarmServer]]()

# nohup and shells in the background ignore these, and so would every process of the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and many compute in several threads
settings.register_profile("duoka", deadline=None)  # tests measure no time
settings.load_profile("duoka")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", metavar="FOLDER", help="where other people's programs lie (tests/programs)")
    parser.addoption("--real-cards", action="store_true", help="run what is marked cards on this machine's GPUs")
    parser.addoption("--workers", default="2", metavar="1,2,3", help="on how many they run")
    parser.addoption(
        "--seed",
        default=0,
        type=int,
        help="of the injected faults (tests/flows/test_faults.py) and of drawn programs (tests/fuzz)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[SERVERS] = {
            "cpu": WarmServer(),
            "cards": WarmServer("cuda"),
            "npu": WarmServer("npu"),
        }


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the warm processes are."""
    node.workerinput["warm"] = {name: server.path for name, server in node.config.stash[SERVERS].items()}


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in config.stash.get(SERVERS, {}).values():
        server.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that are marked so on CPUs and on simulated cards, or on those of two vendors."""
    marker = metafunc.definition.get_closest_marker
    both = marker("cpu_and_cards")
    if both and metafunc.config.getoption("--real-cards"):  # which scripts would use on the CPU's turn, too
        metafunc.parametrize("flow", ["cards"], indirect=True)
    elif both:
        marks = [pytest.mark.long] * both.kwargs.get("long", False)
        metafunc.parametrize("flow", ["cpu", pytest.param("cards", marks=marks)], indirect=True)
    elif marker("cards_and_npu"):
        metafunc.parametrize("flow", ["cards", pytest.param("npu", marks=pytest.mark.npu)], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that have a time limit of their own: they take longest, and would end last."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build simulated cards before the first test, whose time limit it would take, if a test needs them."""
    if session.config.getoption("--real-cards"):
        return
    needed = {name for item in session.items for name in item.keywords}
    kinds = ["cuda"] * bool({"cards", "cpu_and_cards"} & needed) + ["npu"] * ("npu" in needed)
    with suppress(simulated.NoCompiler), ThreadPoolExecutor() as pool:  # the fixture tells
        list(pool.map(simulated.library, kinds))


@pytest.fixture(scope="session", autouse=True)
def loader_workers_are_forked() -> None:
    """Datasets of tests hold functions of the tests, which Python 3.14 cannot pickle for workers."""
    multiprocessing.set_start_method("fork", force=True)


@pytest.fixture(scope="session", autouse=True)
def forks_are_cheap() -> None:
    """Many tests fork this process (`duoka.launch`), which has imported torch."""
    if "torch" in sys.modules:
        make_forks_cheap()


@pytest.fixture(scope="session")
def warm_on(pytestconfig: pytest.Config) -> Iterator[Callable[[str], Warm]]:
    """The process that has imported torch for all runs: "cpu", or "cards", which has simulated ones."""
    worker = getattr(pytestconfig, "workerinput", None)  # of pytest-xdist
    paths = worker["warm"] if worker else {name: server.path for name, server in pytestconfig.stash[SERVERS].items()}
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(closing(Warm(paths[name]))))


@pytest.fixture(scope="session")
def warm(warm_on: Callable[[str], Warm]) -> Warm:
    """The one without cards."""
    return warm_on("cpu")


@pytest.fixture(scope="session")
def cards(pytestconfig: pytest.Config) -> dict[str, str]:
    """The variables of processes with simulated cards; with --real-cards, of the machine's own, of any vendor."""
    if not pytestconfig.getoption("--real-cards"):
        return four_cards("cuda")
    import torch

    found = torch.accelerator.current_accelerator()
    assert found is not None, "--real-cards: torch has no GPU here"
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SIMULATED_DEVICE": found.type}  # which simulates none by itself


def four_cards(kind: str) -> dict[str, str]:
    """The variables of processes with four simulated cards; skips the test where they cannot be built."""
    try:
        return simulated.variables(4, kind)
    except simulated.NoCompiler as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def flow(request: pytest.FixtureRequest, warm_on: Callable[[str], Warm], tmp_path: Path) -> Flow:
    """Runs of `duoka ...` and `python ...` in a folder of the test's own, forked from the warm process.

    The markers `cards` and `npu` give them simulated cards; `cpu_and_cards` and `cards_and_npu` run the test twice.
    """
    marked = (name for name in ("npu", "cards") if request.node.get_closest_marker(name))
    where = getattr(request, "param", next(marked, "cpu"))
    if where == "cpu":
        return Flow(warm_on("cpu"), tmp_path)
    if where == "cards" and request.config.getoption("--real-cards"):
        return Flow(warm_on("cpu"), tmp_path, request.getfixturevalue("cards"))
    machine = {"SIMULATED_MACHINE": f"{zlib.crc32(bytes(tmp_path)):08x}"}
    return Flow(warm_on(where), tmp_path, four_cards("npu" if where == "npu" else "cuda") | machine)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The installed `duoka` as a process of its own: true, and slow to start."""

    def run(*args: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).with_name("duoka")
        env = surroundings(how.pop("env", {}))
        return subprocess.run(
            [program, *args],
            env=env,
            **{"cwd": tmp_path, "timeout": 100, "capture_output": True, "text": True} | how,
        )

    return run
