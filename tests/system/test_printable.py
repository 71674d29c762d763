from __future__ import annotations

import pytest

from duoka.system.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("model.weight → 3 é 多卡", "model.weight → 3 é 多卡"),
        ("a\x1b[31m\r\n\tb\x07\x7f", r"a\x1b[31m\r\n\tb\x07\x7f"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        (12, "12"),
    ],
)
def test_nothing_of_it_is_obeyed_by_a_terminal(text: object, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_long_is_cut() -> None:
    assert printable("x" * 10_000, 10) == "xxxxxxx..."
