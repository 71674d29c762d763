"""`--strategy exact`: the same bits on 1, 2 and 4 workers, and after a crash on another number of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.flows.flow import Flow
from tests.flows.reference import Reference

SCRIPTS = Path(__file__).parent / "scripts" / "exact"
PLAIN = ("mlp", "cnn", "transformer", "force", "hard")
LONG = ("lstm", "gan")


def exact(flow: Flow, script: str, workers: int, *more: str) -> str:
    """What the script prints, of which the last line is a digest of all parameters and buffers."""
    options = ["--strategy", "exact", "--devices", f"cpu:{workers}", *more]
    result = flow.run(["run", "--quiet", *options, flow.script(SCRIPTS / f"{script}.py")])
    assert len(result.ok().stdout.splitlines()[-1]) == 64, result
    return result.stdout


ON_CARDS = [pytest.param("mlp", marks=getattr(pytest.mark, kind), id=f"mlp-{kind}") for kind in ("cards", "npu")]
ON_CARDS += [
    pytest.param(script, marks=[pytest.mark.cards, pytest.mark.long], id=f"{script}-cards")
    for script in ("transformer", "force", "hard", "gan")
]


@pytest.mark.parametrize(
    "script", [*PLAIN, *(pytest.param(script, marks=pytest.mark.long) for script in LONG), *ON_CARDS]
)
def test_the_same_bits_on_any_number_of_workers(flow: Flow, script: str) -> None:
    """And, but for rounding, what python computes."""
    found = exact(flow, script, 1)
    assert exact(flow, script, 4) == found
    if script in ("mlp", *LONG):
        assert exact(flow, script, 2) == found
    if script == "cnn":
        return  # python draws its samples otherwise
    reference = Reference(flow, [flow.script(SCRIPTS / f"{script}.py")], env={"OMP_NUM_THREADS": "1"})
    end = 2 if script == "lstm" else -1  # its last epoch is in bfloat16
    reference.assert_same("\n".join(found.splitlines()[:end]), part=lambda text: "\n".join(text.splitlines()[:end]))


@pytest.mark.parametrize(
    "script", [*PLAIN[:1], *(pytest.param(script, marks=pytest.mark.long) for script in (*PLAIN[1:], *LONG))]
)
def test_the_same_bits_whoever_computes_a_share(flow: Flow, script: str) -> None:
    found = exact(flow, script, 1)
    assert exact(flow, script, 2, "--rows", "3:1") == found
    assert exact(flow, script, 3, "--rows", "1:5:2") == found


def test_shares_decide_the_bits(flow: Flow) -> None:
    two, four = (exact(flow, "mlp", 2, "--shares", shares) for shares in ("2", "4"))
    assert two.splitlines()[-1] != four.splitlines()[-1]


def resumed(flow: Flow, folder: str, workers: int, *deaths: int) -> str:
    """What the last line of a run is that dies by SIGKILL at some steps, each time going on with other workers."""
    script, steps = SCRIPTS / "resumed.py", list(map(str, deaths))
    result = flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", script, folder, "0", *steps])
    assert result.returncode == (137 if deaths else 0), result
    return result.stdout


def test_killed_and_resumed_on_other_numbers_of_workers(flow: Flow) -> None:
    """Resumed also at an epoch's last batch, of which a share's rows are at an odd place in memory."""
    expected = resumed(flow, "never", 1)
    resumed(flow, "run", 2, 4)
    resumed(flow, "run", 3, 10)
    assert resumed(flow, "run", 2) == expected


@pytest.mark.long
def test_killed_and_resumed_many_times(flow: Flow, request: pytest.FixtureRequest) -> None:
    chance = random.Random(request.config.getoption("--seed"))
    expected = resumed(flow, "never", chance.choice((1, 2, 4)))
    for number in range(7):
        for death in sorted(chance.sample(range(1, 13), 3)):
            resumed(flow, f"run{number}", chance.choice((2, 4)), death)
        assert resumed(flow, f"run{number}", chance.choice((1, 2, 4))) == expected


def test_killed_and_started_again(flow: Flow) -> None:
    script = SCRIPTS / "resumed.py"
    expected = resumed(flow, "never", 2)
    result = flow.run(["run", "--quiet", "--restarts", "1", "--devices", "cpu:2", script, "out", "0", "5"])
    assert result.ok().stdout == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--strategy", "exact", "--shares", "6"], "a power of two"),
        (["--strategy", "exact", "--shares", "2", "--devices", "cpu:4"], "at least the number of devices, 4"),
        (["--strategy", "exact", "--batch-norm", "local"], "left out with --strategy exact"),
        (["--strategy", "exact", "--randomness", "worker"], "left out with --strategy exact"),
        (["--shares", "8"], "given with --strategy exact"),
    ],
)
def test_what_cannot_be_is_refused(flow: Flow, options: list[str], told: str) -> None:
    result = flow.run(["run", *options, SCRIPTS / "mlp.py"])
    assert result.returncode == 2, result
    assert told in result.stderr
