from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import OptionError
from duoka.planning.options import Machines, Options, memory_size, seconds, which_machines, whole_number
from duoka.script import Target

TARGET = Target("train.py")


@pytest.mark.parametrize(
    ("option", "given_", "said"),
    [
        (
            "kind",
            "Plain",
            "--kind must be one of auto, plain, distributed, api, but is 'Plain'; did you mean plain?",
        ),
        (
            "batch_norm",
            "locale",
            "--batch-norm must be one of whole, local, but is 'locale'; did you mean local?",
        ),
        ("randomness", "rank", "--randomness must be one of whole, worker, but is 'rank'"),
        (
            "loading",
            "share",
            "--loading must be one of auto, whole, shared, but is 'share'; did you mean shared?",
        ),
        ("threads", 0, "--threads must be a whole number from 1 to 4096, but is 0"),
        ("shares", 6, "--shares must be a power of two from 1 to 4096, but is 6"),
        ("shares", 0, "--shares must be a power of two from 1 to 4096, but is 0"),
        ("restarts", -1, "--restarts must be a whole number from 0 to 1000, but is -1"),
        ("restarts", 1001, "--restarts must be a whole number from 0 to 1000, but is 1001"),
        ("timeout", 0, "--timeout must be more than 0 seconds and at most 30 days, but is 0"),
        ("timeout", math.nan, "but is nan"),
        ("timeout", math.inf, "but is inf"),
    ],
)
def test_what_an_option_does_not_take(option: str, given_: Any, said: str) -> None:
    with pytest.raises(OptionError) as error:
        Options(TARGET, **{option: given_})
    assert said in str(error.value)


def test_logs_do_not_go_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    Options(TARGET, log_dir=path)
    path.write_text("")
    with pytest.raises(OptionError, match="--log-dir must be a directory"):
        Options(TARGET, log_dir=path)
    Options(TARGET, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 90),
        ("90s", 90),
        ("0.5s", 0.5),
        ("1.5m", 90),
        ("10m", 600),
        ("1h", 3600),
        (" 2h ", 7200),
        ("720h", 2592000),
    ],
)
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1d", "1 h", "1h30m", "inf", "nan", "1e3", ".5", "721h", "٣"])
def test_no_seconds(text: str) -> None:
    with pytest.raises(OptionError, match="like 90, 90s, 10m or 1h"):
        seconds(text)


@given(st.integers(1, 30 * 24 * 3600))
def test_seconds_are_the_default_unit(value: int) -> None:
    assert seconds(str(value)) == seconds(f"{value}s") == value


@pytest.mark.parametrize("option", ["--threads", "--restarts", "--shares"])
@pytest.mark.parametrize("text", ["", "x", "1.5", "-1", "1e3", "²", "1" * 5000])
def test_no_whole_number(option: str, text: str) -> None:
    with pytest.raises(OptionError, match=f"{option} must be a (whole number|power of two) from"):
        whole_number(text, option)


def test_a_whole_number() -> None:
    assert whole_number("0", "--restarts") == 0
    assert whole_number("12", "--threads") == 12


NODES = Machines(2, 1, "node1", 20_000, engine="Slurm")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((None, None, None), NODES),
        (("1", None, None), Machines()),
        (("1", "0", None), Machines()),
        (("2", "1", "node1:29500"), Machines(2, 1, "node1", 29500)),
        (("2", "0", "10.0.0.1:1"), Machines(2, 0, "10.0.0.1", 1)),
        (("2", "0", "[fd00::2]:29500"), Machines(2, 0, "fd00::2", 29500)),
    ],
)
def test_which_machines(typed: tuple[str | None, str | None, str | None], expected: Machines) -> None:
    found = which_machines(*typed, from_engine=lambda count: None if count == 1 else NODES)
    assert found == expected
    assert typed[2] is None or found.rendezvous == typed[2]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("0", "0", "a:1"), "--machines must be a whole number from 1 to 4096, but is 0"),
        (("two", "0", "a:1"), "--machines must be a whole number from 1 to 4096, but is 'two'"),
        (("2", "2", "a:1"), "--machine must be from 0 to 1, but is 2; --machines 2 are numbered from 0"),
        (("2", "-1", "a:1"), "--machine must be the number of this machine, 0 for the first, but is '-1'"),
        (("1", "1", None), "--machine must be from 0 to 0, but is 1"),
        (("2", None, "a:1"), "--machine must be given with --machines, from 0 to 1"),
        (("2", "0", None), "--rendezvous must be given with --machines"),
        ((None, "0", None), "--machines must be given with --machine and --rendezvous"),
        ((None, None, "a:1"), "--machines must be given with --machine and --rendezvous"),
        (("2", "0", "node1"), "--rendezvous must be HOST:PORT, like node1:29500, but is 'node1'"),
        (("2", "0", "node1:"), "--rendezvous must be HOST:PORT"),
        (("2", "0", ":29500"), "--rendezvous must be HOST:PORT"),
        (("2", "0", "node1:0"), "--rendezvous must be HOST:PORT"),
        (("2", "0", "node1:65536"), "--rendezvous must be HOST:PORT"),
        (("2", "0", "fd00::2:29500"), "--rendezvous must be HOST:PORT"),
        (("2", "0", "tcp://node1:1"), "--rendezvous must be HOST:PORT"),
    ],
)
def test_no_machines(typed: tuple[str | None, str | None, str | None], said: str) -> None:
    with pytest.raises(OptionError) as error:
        which_machines(*typed, from_engine=lambda count: None)
    assert said in str(error.value)


def test_what_is_typed_must_be_what_an_engine_tells() -> None:
    told = Machines(4, 1, "node1", 29500, engine="Slurm")
    assert which_machines("4", None, None, lambda count: told) is told
    with pytest.raises(
        OptionError, match="--machines must be 4, as set by Slurm, but is '2'; --machines 1 makes each"
    ):
        which_machines("2", None, None, lambda count: told)


def test_commands_for_a_rank_each_are_numbered_on_their_machines() -> None:
    hosts = ("a", "a", "b", "a")
    machines = Machines(4, 3, workers=(1,) * 4, names=("x", "x", "y", "x"), hosts=hosts, each="rank")
    assert machines.beside(1) == (2, 3, 0, 2)
    assert (machines.spans[machines.number].start, machines.called(2), machines.where(2)) == (3, "rank 2 (y)", "y")


def test_ranks_are_numbered_machine_by_machine() -> None:
    machines = Machines(3, 1, workers=(2, 1, 3), names=("a", "b", "c"))
    assert machines.spans[machines.number].start == 2
    assert [machines.machine_of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert machines.called(2) == "machine 2 (c)"
    assert Machines(2).called(1) == "machine 1"


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("16 GiB", 2**34), ("1.5MB", 1_500_000), ("2TB", 2 * 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert memory_size(text, "--device-memory") == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "0GB", "80Gb", "1e3GB", "80GB/s"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match=f"--device-memory must be a size such as 80GB, .* but is '{text}'"):
        memory_size(text, "--device-memory")
