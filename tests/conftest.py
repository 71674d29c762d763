from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.flows.flow import Flow, Warm, WarmServer, surroundings
from tests.flows.warm import make_forks_cheap

SERVER = pytest.StashKey[WarmServer]()

# nohup and shells in the background ignore these, and so would every process of the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and many compute in several threads
settings.register_profile("duoka", deadline=None)  # tests measure no time
settings.load_profile("duoka")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--programs", metavar="FOLDER", help="where other people's programs lie (tests/programs)")
    parser.addoption("--workers", default="2", metavar="1,2,3", help="on how many they run")
    parser.addoption(
        "--seed", default=0, type=int, help="of the faults that are injected (tests/flows/test_faults.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[SERVER] = WarmServer()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the warm process is."""
    node.workerinput["warm"] = node.config.stash[SERVER].path


def pytest_unconfigure(config: pytest.Config) -> None:
    if SERVER in config.stash:
        config.stash[SERVER].close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that have a time limit of their own: they take longest, and would end last."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


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
def warm(pytestconfig: pytest.Config) -> Iterator[Warm]:
    """The one process that has imported torch for all runs."""
    worker = getattr(pytestconfig, "workerinput", None)  # of pytest-xdist
    warm = Warm(worker["warm"] if worker else pytestconfig.stash[SERVER].path)
    yield warm
    warm.close()


@pytest.fixture
def flow(warm: Warm, tmp_path: Path) -> Flow:
    """Runs of `duoka ...` and `python ...` in a folder of the test's own, forked from the warm process."""
    return Flow(warm, tmp_path)


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
