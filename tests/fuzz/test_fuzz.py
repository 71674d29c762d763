"""Drawn programs print on ranks what they print on one device: `python -m tests.fuzz` looks for those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from duoka.view.tensor.batch import BatchTensor
from tests.fuzz.known import on
from tests.fuzz.search import FAMILIES, Search

PROGRAMS = {
    "views": 45,
    "gradients": 30,
    "modules": 15,
    "loading": 15,
    "optimizing": 15,
    "setting": 15,
    "crossing": 40,
    "layers": 10,
    "operating": 20,
}
MANY = 2000


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_programs(family: str) -> None:
    _search(family, FAMILIES[family][1], PROGRAMS[family], 1, of_each=2)


@pytest.mark.long
# Many crossed programs meet what docs/plain-scripts.md leaves open: `python -m tests.fuzz crossing` is read by hand.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "crossing"])
def test_many_programs(family: str, pytestconfig: pytest.Config) -> None:
    _search(family, FAMILIES[family][1], MANY, pytestconfig.getoption("seed"))


def _search(family: str, strategies: Sequence[str], programs: int, seed: int, of_each: int = 99) -> None:
    with Search(family, [2, 3], strategies, of_each) as search:
        search.run(programs, seed, most=3)
    assert search.tried == programs
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
