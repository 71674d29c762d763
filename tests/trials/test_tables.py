from __future__ import annotations

from rich.table import Table

from duoka.trials.tables import render_table


def test_a_table_that_is_not_for_a_terminal_is_not_cut_at_its_width() -> None:
    table = Table("what", "why", box=None)
    table.add_row("a", "word " * 30)
    head, row = render_table(table).splitlines()
    assert head.split() == ["what", "why"]
    assert row.endswith("word word")
    assert row.count("word") == 30
