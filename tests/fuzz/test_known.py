"""Programs that ranks once ran otherwise than one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.compare import difference, play_on_one_device, script
from tests.fuzz.known import HELD_ROWS, LAYOUTS, OTHERS, SHARDED
from tests.fuzz.ranks import Ranks

KNOWN = LAYOUTS | OTHERS | HELD_ROWS | SHARDED
RUNS = [("ddp", 2), ("ddp", 3), ("exact", 2), ("exact", 3)]


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
    program = KNOWN[name]
    expected = play_on_one_device(program)
    assert expected.error is None
    of_fsdp = [("fsdp", 2)] if name in SHARDED or name in HELD_ROWS else []
    for run in [*([] if name in SHARDED else RUNS), *of_fsdp]:
        found = difference(program, ranks[run], expected)
        assert found is None, f"{run}: {found.kind}: {found.text}\n{script(program)}"
