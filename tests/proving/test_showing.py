from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from duoka.hardware.gpu import Device
from duoka.proving.comparing import Bound, Gap, RunComparison, judge
from duoka.proving.proof import Outcome, Proof, ProofRequest, ScriptRun
from duoka.proving.showing import page
from tests.forecasting.made import plan

GAPS = [Gap(step, f"layer<{name}>", 10.0 ** (-6 + step), 1.0, 1.0, 2**-23) for step in (1, 2, 3) for name in "ab"]


def proof(*gaps: Gap, losses: tuple[float, ...] = (4.0, 2.0, 1.0)) -> Proof:
    one, two = (ScriptRun(f"cpu:{count}", plan((Device("cpu"),) * count)) for count in (1, 2))
    found = RunComparison(tuple(gaps), (3, 3), None, (losses, losses))
    bound = Bound([])
    request = ProofRequest(one, (two,), 3, 0, "rounding", Path())
    return Proof(request, 3, (Outcome(two, found, judge(found, bound), "a cause"),), bound if gaps else None)


def lines(text: str, title: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart, as fractions of its width and height from below."""
    figure = text.split(f"<h2>{title}</h2>")[1].split("</figure>")[0]
    places = [re.findall(r"[ML]([\d.]+) (-?[\d.]+)", path) for path in re.findall(r' d="(M[^"H]*)"', figure)]
    return [[(float(x) / 1000, 1 - float(y) / 240) for x, y in place] for place in places]


def test_differences_by_step_and_tensor() -> None:
    text = page(proof(*GAPS), "train.py")
    assert "<h1>train.py: different, wanted was: equal to rounding</h1>" in text
    first, second, limit = lines(text, "cpu:2: differences from cpu:1")
    assert first == second == [pytest.approx((step / 3, (step - 1) / 3), abs=1e-3) for step in (1, 2, 3)]
    assert [height for _, height in limit] == pytest.approx([1 / 3] * 3, abs=1e-3)  # OF_MOVE of 1: 1e-4
    assert "<span>1e-2</span><span>1e-5</span>" in text
    assert "layer&lt;a&gt;" in text
    assert "cause: a cause" in text


def test_losses_of_both_runs() -> None:
    first, second = lines(page(proof(losses=(4.0, math.nan, 1.0)), "train.py"), "cpu:2: loss")
    assert first == second == [pytest.approx(one, abs=1e-3) for one in [(1 / 3, 1.0), (1.0, 0.0)]]


def test_without_a_difference_there_is_nothing_to_draw() -> None:
    text = page(proof(losses=()), "train.py")
    assert "identical bits" in text
    assert "<figure>" not in text


def test_a_tensor_that_cannot_be_compared_is_named() -> None:
    text = page(proof(Gap(1, "bias", math.inf, math.inf, 0.0, 0.0, "is in the first run only"), *GAPS), "train.py")
    assert "step 1, bias is in the first run only" in text
    assert "<h2>cpu:2: differences from cpu:1</h2>" in text
