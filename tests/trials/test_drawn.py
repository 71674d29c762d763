from __future__ import annotations

from rich.table import Table

from duoka.trials.drawn import drawn


def test_a_table_that_is_not_for_a_terminal_is_not_cut_at_its_width() -> None:
    table = Table("what", "why", box=None)
    table.add_row("a", "word " * 30)
    head, row = drawn(table).splitlines()
    assert head.split() == ["what", "why"]
    assert row.endswith("word word")
    assert row.count("word") == 30
