from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from duoka.system import environment
from duoka.system.environment import RANKS, RankInfo

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test sets is taken back."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_nothing_of_a_rank_is_left() -> None:
    os.environ.update(dict.fromkeys(RANKS, "1"), OTHER="1")
    environment.unset(environment.RANKS)
    assert not set(RANKS) & set(os.environ)
    assert os.environ["OTHER"] == "1"


def test_nothing_of_a_task_of_slurm_s_is_left_but_its_job() -> None:
    os.environ.update(dict.fromkeys(environment.TASKS, "1"), SLURM_JOB_ID="7")
    environment.unset(environment.TASKS)
    assert not set(environment.TASKS) & set(os.environ)
    assert os.environ["SLURM_JOB_ID"] == "7"


@pytest.mark.parametrize(("rank", "mode"), [(0, "online"), (1, "disabled")])
def test_rank_0_alone_logs_to_wandb(rank: int, mode: str) -> None:
    os.environ["WANDB_MODE"] = "online"
    environment.disable_wandb_except_on_rank_0(rank)
    assert os.environ["WANDB_MODE"] == mode


def test_a_rank_is_told_its_place_and_nothing_stale() -> None:
    os.environ.update(RANK="7", MASTER_ADDR="elsewhere", TORCHELASTIC_ERROR_FILE="stale")
    environment.set_rank_variables(RankInfo(rank=1, world_size=4, attempt=2, port=1234, run_id="abc", restarts=5))
    told = {name: os.environ.get(name) for name in RANKS}
    assert told == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RUN_ID": "abc",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": None,
        "DUOKA_RUN_ID": "abc",
    }


def test_a_rank_of_several_machines_is_told_its_place_as_torchrun_tells_it() -> None:
    place = RankInfo(
        rank=3, world_size=5, attempt=0, port=1234, run_id="abc", host="node1", machine=1, machines=2, first=2, here=3
    )
    environment.set_rank_variables(place)
    ranks = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")]
    sizes = [os.environ[f"{name}WORLD_SIZE"] for name in ("", "LOCAL_", "GROUP_", "ROLE_")]
    assert (ranks, sizes) == (["3", "1", "1", "3", "node1"], ["5", "3", "2", "5"])


def test_without_a_store_of_the_launcher_rank_0_opens_one() -> None:
    environment.set_rank_variables(RankInfo(rank=0, world_size=1, attempt=0, port=0, run_id="abc"))
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_threads_are_set_only_where_they_are_planned() -> None:
    os.environ["OMP_NUM_THREADS"] = "9"
    environment.set_pool_sizes(None)
    assert environment.threads() == "9"
    environment.set_pool_sizes(2)
    assert environment.threads() == "2"


def test_what_is_not_set_is_none() -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    assert environment.first_set(["NO_SUCH_VARIABLE"]) is None
    assert environment.threads() is None


def test_a_chosen_interface_of_gloo_is_respected() -> None:
    environment.set_gloo_device()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    environment.set_gloo_device()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(("seed", "differ"), [(None, True), ("random", True), ("0", False), ("17", False)])
def test_whether_each_process_hashes_texts_differently(seed: str | None, differ: bool) -> None:
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    assert environment.fix_hash_seed() == differ
    assert not environment.fix_hash_seed()
    assert os.environ["PYTHONHASHSEED"] == (seed if seed and seed.isdecimal() else "0")


def test_the_address_of_the_rendezvous() -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert environment.master(5) is None
    os.environ["MASTER_ADDR"] = "node1"
    assert environment.master() is None
    assert environment.master(5) == ("node1", 5)
    os.environ["MASTER_PORT"] = "6"
    assert environment.master(5) == ("node1", 6)
    assert 20_000 <= environment.port_of(10**9) < 32_000


def test_no_other_file_touches_the_environment() -> None:
    touching = {"environ", "environb", "getenv", "putenv", "unsetenv"}

    def touches(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.module == "os" and bool(touching & {alias.name for alias in node.names})
        return isinstance(node, ast.Attribute) and node.attr in touching and ast.unparse(node.value) == "os"

    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if touches(node)
    }
    # Importing duoka imports none of its modules, and one variable must be set before torch is imported.
    assert found == {"src/duoka/system/environment.py", "src/duoka/__init__.py"}
