"""Programs that ranks once ran otherwise than one device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz.compare import difference, play_on_one_device, script
from tests.fuzz.known import HELD_ROWS, LAYOUTS, OTHERS, SHARDED
from tests.fuzz.program import DEVICE
from tests.fuzz.ranks import Ranks

KNOWN = LAYOUTS | OTHERS | HELD_ROWS | SHARDED
RUNS = [("ddp", 2), ("ddp", 3), ("exact", 2), ("exact", 3)]
NOT_ON_CARDS = {
    **dict.fromkeys(
        (
            "writes that fail",
            "an index out of range of one rank, in a tensor that all have",
            "a row after a write that fails",
        ),
        "an index out of range is an assert of the card, after which it does nothing more",
    ),
    "an integer divided by zero in the rows of one rank": "a card raises no error; the CPU, which simulates it, dies",
    "put": "exact computes in torch's deterministic mode, which has no put_ for cards",
    **dict.fromkeys(
        ("draws that raise an error of types", "draws that raise an error of values"),
        "a card draws by another order of checks and numbers than the CPU",
    ),
}
SHORT_ON_CARDS = (
    "a batch as the weight of a plain tensor's gradient",
    "a checkpoint of rows that a module keeps",
    "a checkpoint of what is no batch",
    "expand to more rows",
    "layout after a list behind a new dimension",
    "layout after a mask of other dimensions",
    "one number of a batch",
    "parameters in a batch's memory",
    "parameters in a parameter's memory",
    "real and imaginary parts that are set",
    "storages",
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[tuple[str, int], Ranks]]:
    made = {run: Ranks(run[1], run[0]) for run in (*RUNS, ("fsdp", 2))}
    yield made
    for one in made.values():
        one.close()


def test_no_name_hides_another_program() -> None:
    assert len(KNOWN) == sum(map(len, (LAYOUTS, OTHERS, HELD_ROWS, SHARDED)))


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str, ranks: dict[tuple[str, int], Ranks]) -> None:
    of_fsdp = [("fsdp", 2)] if name in SHARDED or name in HELD_ROWS else []
    others = [] if name in SHARDED else _half_of_runs(name)
    _play(name, {run: ranks[run] for run in [*others, *of_fsdp]})


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in SHARDED])
def test_known_in_the_other_runs(name: str, ranks: dict[tuple[str, int], Ranks]) -> None:
    _play(name, {run: ranks[run] for run in RUNS if run not in _half_of_runs(name)})


def _half_of_runs(name: str) -> list[tuple[str, int]]:
    """Return ddp and exact on 2 ranks for every second program, on 3 for the others."""
    return RUNS[list(KNOWN).index(name) % 2 :: 2]


def _play(name: str, ranks: dict[tuple[str, int], Ranks]) -> None:
    if DEVICE != "cpu" and name in NOT_ON_CARDS:
        pytest.skip(NOT_ON_CARDS[name])
    program = KNOWN[name]
    expected = play_on_one_device(program)
    assert expected.error is None
    for run, of_run in ranks.items():
        found = difference(program, of_run, expected)
        assert found is None, f"{run}: {found.kind}: {found.text}\n{script(program)}"


@pytest.mark.cards
def test_some_on_cards(cards: dict[str, str]) -> None:
    _play_on_cards(cards, [f"test_known[{name}]" for name in SHORT_ON_CARDS])


@pytest.mark.cards
@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_on_cards(cards: dict[str, str]) -> None:
    _play_on_cards(cards, ["test_known", "test_known_in_the_other_runs"])


def _play_on_cards(cards: dict[str, str], tests: list[str]) -> None:
    """Run these tests in a process in which torch has cards."""
    options = ["-q", "-p", "no:xdist", "-m", ""]
    words = [sys.executable, "-m", "pytest", *options, *(f"{__file__}::{name}" for name in tests)]
    done = subprocess.run(words, env={**os.environ, **cards, "FUZZ_DEVICE": "cuda"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
