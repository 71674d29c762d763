"""Programs that ranks once ran otherwise than one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.compare import difference, script
from tests.fuzz.known import LAYOUTS, OTHERS, SHARDED
from tests.fuzz.ranks import Ranks

KNOWN = LAYOUTS | OTHERS | SHARDED
MENDED = {
    *("contiguous of a transposed batch", "strides", "a flag in a record", "a row written after a fused step"),
    *("parameters() that returns a list", "LBFGS over one free parameter"),
    *("traced after a step", "jacobians after a step"),
}
RUNS = [("ddp", 2), ("ddp", 3), ("exact", 2)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[tuple[str, int], Ranks]]:
    made = {run: Ranks(run[1], run[0]) for run in (*RUNS, ("fsdp", 2))}
    yield made
    for one in made.values():
        one.close()


def _marked(name: str) -> object:
    """A name is added to MENDED by the change that mends its program; the table goes with the last one."""
    return pytest.param(name, marks=[] if name in MENDED else pytest.mark.xfail(strict=False))


@pytest.mark.parametrize("name", list(map(_marked, KNOWN)))
def test_known(name: str, ranks: dict[tuple[str, int], Ranks]) -> None:
    program = KNOWN[name]
    for run in [("fsdp", 2)] if name in SHARDED else RUNS:
        found = difference(program, ranks[run])
        assert found is None, f"{run}: {found.kind}: {found.text}\n{script(program)}"
