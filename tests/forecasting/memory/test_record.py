from __future__ import annotations

from pathlib import Path

from duoka.forecasting.memory.record import read, write
from tests.forecasting.memory.made import Story


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    story = Story()
    story.alive(1, "parameter", 0)
    story.now("enter", 0)
    story.record.returned[0] = [story.make(2, "rows", call=0)]
    story.now("leave", 0)
    write(tmp_path, story.record)
    assert read(tmp_path) == story.record
