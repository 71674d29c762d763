from __future__ import annotations

from duoka.view.recent import Recent


def test_what_is_not_there_is_none() -> None:
    table = Recent(4)
    assert table["a"] is None
    table.keep("a", 1)
    assert table["a"] == 1


def test_what_is_asked_for_stays_and_the_rest_goes() -> None:
    table = Recent(8)
    table.keep("asked", 0)
    for number in range(1, 100):
        table.keep(number, number)
        assert table["asked"] == 0
        assert table[number] == number
        assert len(table.everything()) <= 8
        assert all(table[max(1, number - back)] is not None for back in range(3))
    assert table[50] is None


def test_it_can_be_emptied() -> None:
    table = Recent(4)
    for number in range(1, 4):
        table.keep(number, number)
    table.clear()
    assert table.everything() == []
    assert table[1] is table[3] is None
