from __future__ import annotations

import math

import pytest

from duoka.proving.comparing import RunComparison
from duoka.proving.proof import begins_alike


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ((2.0, 1.0), (2.001, 3.0), True),  # what comes later is the script's own doing
        ((2.0, 1.0), (2.2, 1.0), False),
        ((0.0,), (0.0,), True),
        ((math.nan,), (math.nan,), True),
        ((), (), True),
    ],
)
def test_a_run_whose_first_loss_is_another_shows_no_rounding(
    one: tuple[float, ...], other: tuple[float, ...], alike: bool
) -> None:
    assert begins_alike(RunComparison((), (2, 2), None, (one, other))) is alike
