from __future__ import annotations

import pytest

from duoka.doctor.host import check_folder, examine_disks

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "writable", "level"),
    [(100 * GIB, True, "ok"), (GIB, True, "advice"), (GIB // 100, True, "fault"), (100 * GIB, False, "fault")],
)
def test_a_folder(free: int, writable: bool, level: str) -> None:
    assert check_folder("disk", "/here", free, writable).level == level


def test_a_disk_on_which_no_file_can_be_made() -> None:
    finding = check_folder("disk", "/here", 100 * GIB, writable=True, no_files=True)
    assert (finding.level, finding.what) == (
        "fault",
        "/here: 100.0 GiB are free, but no inodes are free, so no file can be created",
    )


def test_here() -> None:
    assert 1 <= len(list(examine_disks())) <= 2
