"""Unedited scripts on 1 to 4 workers print the numbers, and save the weights, that `python script.py` does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.flows.flow import Flow, Result

HERE = Path(__file__).parent / "scripts"
SCRIPTS = {path.stem: path for path in sorted(HERE.glob("*.py"))}
IN_PARTS = {path.stem: path for path in sorted((HERE / "fsdp").glob("*.py"))}
Reference = Callable[[Flow, str], tuple[Result, Path]]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What plain python gives on one device, once for each script, on CPUs and on cards."""
    done: dict[tuple[str, bool], tuple[Result, Path]] = {}

    def run(flow: Flow, name: str) -> tuple[Result, Path]:
        key = name, bool(flow.cards)
        if key not in done:
            folder = tmp_path_factory.mktemp(name)
            alone = Flow(flow.warm, folder, {**flow.cards, "SIMULATED_CARDS": "1"} if flow.cards else {})
            saved = folder / "weights.pt"
            done[key] = alone.python([alone.script(script(name)), saved]).ok(), saved
        return done[key]

    return run


def script(name: str) -> Path:
    return SCRIPTS.get(name) or IN_PARTS[name]


def assert_same_lines(expected: str, actual: str) -> None:
    """The same text, and every number in it equal but for rounding."""
    assert NUMBER.sub("#", actual) == NUMBER.sub("#", expected)
    for one, other in zip(NUMBER.findall(expected), NUMBER.findall(actual), strict=True):
        digits = len(one.partition(".")[2])
        last_place = 1.01 * 10**-digits if digits else 0  # printed numbers are rounded already
        assert math.isclose(float(one), float(other), rel_tol=1e-5, abs_tol=last_place), f"{one} != {other}"


def assert_same_weights(expected: Path, actual: Path, *, each: bool = True) -> None:
    """The same but for rounding: each weight, or (each=False) each tensor as a whole, by its norm.

    Adam makes a step of any gradient, so it amplifies the rounding of a few that are next to nothing.
    """
    before, after = (tree_leaves(torch.load(path, map_location="cpu")) for path in (expected, actual))
    assert len(before) == len(after) > 0
    for one, other in zip(before, after, strict=True):
        if each or not one.is_floating_point():
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
        else:
            assert one.shape == other.shape
            assert float((other - one).norm()) <= 1e-5 * float(one.norm())


RUNS: list[Any] = [(name, 3) for name in SCRIPTS]  # shares are uneven: what holds on them, holds on two
RUNS += [("regress", workers) for workers in (1, 2, 4)]
RUNS += [pytest.param("classify", workers, marks=pytest.mark.long) for workers in (1, 4)]
RUNS += [pytest.param(name, 2, marks=pytest.mark.long) for name in SCRIPTS if name != "regress"]


def on_cards(names: Iterable[str], short: Collection[str]) -> list[Any]:
    """Parameters for runs on two simulated cards; those that are not in `short` are marked long."""
    marks = {name: [pytest.mark.cards, *[pytest.mark.long] * (name not in short)] for name in names}
    return [pytest.param(name, 2, marks=marks[name], id=f"{name}-cards") for name in names]


# Left out: their loaders' workers or generators are the CPU's, CTC, arrays of batches, autocast of the CPU.
NOT_ON_CARDS = ("changing", "precision", "reading", "sequences", "streams")
RUNS += on_cards([name for name in SCRIPTS if name not in NOT_ON_CARDS], ("adversaries", "classify", "language"))


@pytest.mark.parametrize(("name", "workers"), RUNS)
def test_same_result(flow: Flow, reference: Reference, name: str, workers: int) -> None:
    expected, weights = reference(flow, name)
    saved = flow.folder / "weights.pt"
    result = flow.run(["run", "--devices", f"cpu:{workers}", flow.script(SCRIPTS[name]), saved]).ok()
    assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, saved, each=name != "changing")  # which rounds activations to a grid


NOT_IN_PARTS = ("by_hand", "changing")  # LBFGS; rounding is amplified past what is compared
PARTED: list[Any] = [("language", 3), ("precision", 2), *((name, 3) for name in IN_PARTS)]
PARTED += [
    pytest.param(name, workers, marks=pytest.mark.long)
    for name in (*SCRIPTS, *IN_PARTS)
    for workers in (2, 3)
    if (name, workers) not in PARTED and name not in NOT_IN_PARTS
]
PARTED_ON_CARDS = [name for name in (*SCRIPTS, *IN_PARTS) if name not in (*NOT_IN_PARTS, *NOT_ON_CARDS)]
PARTED += on_cards(PARTED_ON_CARDS, ("language", "apart"))


@pytest.mark.parametrize(("name", "workers"), PARTED)
def test_same_result_with_parameters_in_parts(flow: Flow, reference: Reference, name: str, workers: int) -> None:
    expected, weights = reference(flow, name)
    saved = flow.folder / "weights.pt"
    words = ["run", "--devices", f"cpu:{workers}", "--strategy", "fsdp"]
    result = flow.run([*words, flow.script(script(name)), saved]).ok()
    assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, saved)
