from __future__ import annotations

import pytest

from duoka.doctor.disk import examine, of_folder

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "writable", "level"),
    [(100 * GIB, True, "ok"), (GIB, True, "advice"), (GIB // 100, True, "fault"), (100 * GIB, False, "fault")],
)
def test_a_folder(free: int, writable: bool, level: str) -> None:
    assert of_folder("disk", "/here", free, writable).level == level


def test_here() -> None:
    assert 1 <= len(list(examine())) <= 2
