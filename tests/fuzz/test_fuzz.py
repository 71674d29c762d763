"""Drawn programs print on ranks what they print on one device: `python -m tests.fuzz` looks for those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from duoka.view.tensor.batch import BatchTensor
from tests.fuzz.known import on
from tests.fuzz.search import FAMILIES, Search

# The layouts of batches are not yet those of one device's tensors, which many programs of views show.
BEING_MENDED = {"views"}
PROGRAMS = 120  # of each family in `make test`
MANY = 5000


def _families(being_mended: bool) -> Iterator[Any]:
    for family in FAMILIES:
        wrong = family in BEING_MENDED and not being_mended
        yield pytest.param(family, marks=pytest.mark.skip("being mended") if wrong else [])


@pytest.mark.parametrize("family", list(_families(being_mended=False)))
def test_programs(family: str) -> None:
    _search(family, PROGRAMS, 1)


@pytest.mark.long
@pytest.mark.parametrize("family", list(_families(being_mended=True)))
def test_many_programs(family: str, pytestconfig: pytest.Config) -> None:
    _search(family, MANY, pytestconfig.getoption("seed"))


def _search(family: str, programs: int, seed: int) -> None:
    with Search(family, [2, 3]) as search:
        search.run(programs, seed, most=3)
    assert search.tried >= programs // 2  # hypothesis may find that there are no more
    assert not search.faults, search.report()


def test_a_wrong_rule_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Any, args: Any, kwargs: Any) -> Any:
        return args[0] * 1

    monkeypatch.setattr(BatchTensor, "rules", {**BatchTensor.rules, torch.Tensor.__neg__: wrong})
    long = (
        *("a = x + 1", "for _ in range(3): a.clone()", "b = a.flip(1) if step % 2 else -a", "c = b * 2"),
        "print(x.sum().item())",
    )
    program = on("(6, 3)", *long, "print(c.tolist())")
    with Search("views", [2], ["ddp"]) as search:
        search.try_one(program)
    ((small, found),) = search.faults.values()
    assert found.kind == "differs"
    assert len(small.body) == 4
    assert "b = -a" in small.body  # of which `a.flip` is the other half
