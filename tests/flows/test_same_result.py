"""Unedited scripts on 1 to 4 workers print the numbers, and save the weights, that `python script.py` does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.flows.flow import Flow, Result, Warm

HERE = Path(__file__).parent / "scripts"
SCRIPTS = {path.stem: path for path in sorted(HERE.glob("*.py"))}
IN_PARTS = {path.stem: path for path in sorted((HERE / "fsdp").glob("*.py"))}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def reference(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Result, Path]]:
    """What plain python gives, once for each script."""
    done: dict[str, tuple[Result, Path]] = {}

    def run(name: str) -> tuple[Result, Path]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            saved = folder / "weights.pt"
            script = SCRIPTS.get(name) or IN_PARTS[name]
            done[name] = Flow(warm, folder).python([script, saved]).ok(), saved
        return done[name]

    return run


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
    before, after = (tree_leaves(torch.load(path)) for path in (expected, actual))
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


@pytest.mark.parametrize(("name", "workers"), RUNS)
def test_same_result(flow: Flow, reference: Callable[[str], tuple[Result, Path]], name: str, workers: int) -> None:
    expected, weights = reference(name)
    saved = flow.folder / "weights.pt"
    result = flow.run(["run", "--devices", f"cpu:{workers}", SCRIPTS[name], saved]).ok()
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


@pytest.mark.parametrize(("name", "workers"), PARTED)
def test_same_result_with_parameters_in_parts(
    flow: Flow, reference: Callable[[str], tuple[Result, Path]], name: str, workers: int
) -> None:
    expected, weights = reference(name)
    saved = flow.folder / "weights.pt"
    script = SCRIPTS.get(name) or IN_PARTS[name]
    result = flow.run(["run", "--devices", f"cpu:{workers}", "--strategy", "fsdp", script, saved]).ok()
    assert_same_lines(expected.stdout, result.stdout)
    assert_same_weights(weights, saved)
