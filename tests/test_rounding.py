from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import TIMES, UNITS, assert_same, moved

X = torch.linspace(1, 2, 64) * torch.tensor([1e4, -1e4]).repeat(32)


def cancelled(x: Tensor) -> list[Tensor]:
    return [x.sum(), x]


def test_what_cancels_may_differ_as_far_as_rounding_takes_it() -> None:
    expected = cancelled(X)
    reordered = [X[torch.arange(63, -1, -1)].cumsum(0)[-1], X]
    assert expected[0] != reordered[0]
    assert_same(expected, reordered, lambda seed: cancelled(moved(X, seed)))
    with pytest.raises(AssertionError, match="rounding changes these by"):
        assert_same(expected, [expected[0] + 1, X], lambda seed: cancelled(moved(X, seed)))
    with pytest.raises(AssertionError, match="leaf 1"):  # what rounding does to one excuses no other
        assert_same(expected, [expected[0], X + 1], lambda seed: cancelled(moved(X, seed)))


def test_numbers_of_a_text_are_compared_one_by_one() -> None:
    def again(seed: int) -> str:
        return "loss 0.1240, 3 of 4"

    assert_same("loss 0.1234, 3 of 4", "loss 0.1235, 3 of 4", again)
    assert_same("loss 0.1234, 3 of 4", f"loss {0.1234 + TIMES * 0.0006:.4f}, 3 of 4", again)
    for other in ("loss 0.1290, 3 of 4", "loss 0.1234, 2 of 4", "Loss 0.1234, 3 of 4"):
        with pytest.raises(AssertionError):
            assert_same("loss 0.1234, 3 of 4", other, again)


@pytest.mark.parametrize("value", [torch.tensor([1, 2]), torch.tensor([True, False]), 3, None])
def test_what_is_not_rounded_is_equal(value: object) -> None:
    other = value + 1 if isinstance(value, int) else ~value if isinstance(value, Tensor) else 0
    assert_same([value], [value], lambda seed: pytest.fail("nothing differs"))
    with pytest.raises(AssertionError):
        assert_same([value], [other], lambda seed: [value])


def test_a_few_units_in_the_last_place_need_no_measurement() -> None:
    near = X + X.abs().max() * torch.finfo(X.dtype).eps * (UNITS - 2)
    assert_same(X, near, lambda seed: pytest.fail("they are near"))


def test_modules_are_moved_as_tensors_are() -> None:
    net = nn.Linear(3, 3)
    other = moved([net, "a", X], 0)
    assert not torch.equal(other[0].weight, net.weight)
    assert other[1] == "a"
    torch.testing.assert_close(other[2], X, rtol=2 * torch.finfo(X.dtype).eps, atol=0)
