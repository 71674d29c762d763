from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from duoka.system.messages import Lines, duration, in_words, is_open, per_second, printable
from tests.flows.flow import Flow


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["text\n"], False),
        (["text"], True),
        (["text", "\n"], False),
        (["one\ntwo"], True),
        (["\r 10%|#   |"], True),
        (["\r 10%|#   |", "\r 20%|##  |", "\n"], False),
        (["loss 0.5\r"], True),
        (["loss 0.5\r", "\r"], True),
        (["\r 99%|####|", "\r            ", "\r"], False),  # tqdm(leave=False) wipes its bar out
        (["\x1b[?25l\x1b[32mworking\x1b[0m"], True),
        (["\x1b[2K\x1b[1A"], False),
        (["working", "\x1b[?25h"], True),
        ([""], False),
    ],
)
def test_whether_a_line_is_open(written: list[str], expected: bool) -> None:
    state = False
    for text in written:
        state = is_open(text, state)
    assert state == expected


@contextmanager
def terminal(path: Path) -> Iterator[Path]:
    """A file to which standard output and error lead."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr", "__stderr__"):
            stream = stack.enter_context(path.open("a", buffering=1))
            stack.enter_context(patch.object(sys, name, stream))
        yield path


def test_lines_wait_for_the_end_of_the_script_s(tmp_path: Path) -> None:
    with terminal(tmp_path / "terminal") as path:
        with Lines() as lines:
            lines.say("first")
            print("\r 10%", end="", flush=True)
            lines.say("second")
            lines.say("third")
            print("\r100%", end="", flush=True)
            print()
            print("end", end="", flush=True)
            lines.say("fourth")
        print("afterwards")
        text = "duoka: first\n\r 10%\r100%\nduoka: second\nduoka: third\nend\nduoka: fourth\nafterwards\n"
        assert path.read_bytes().decode() == text


def test_output_that_goes_elsewhere_keeps_nobody_waiting(tmp_path: Path) -> None:
    with terminal(tmp_path / "terminal") as path, open(tmp_path / "other", "w") as other:
        for stream in (other, io.StringIO(), None):
            with patch.object(sys, "stdout", stream), Lines() as lines:
                print("begun", end="")
                lines.say("at once")
                assert path.read_text() == "duoka: at once\n"
                path.write_text("")


def test_no_line_lands_in_a_bar(flow: Flow) -> None:
    source = """
        import sys, torch
        from torch.utils.data import DataLoader
        model, data = torch.nn.Linear(3, 1), torch.randn(12, 3)
        for number, x in enumerate(DataLoader(data, 4)):
            sys.stderr.write(f"\\r{number}/3 |##  |")
            model(x).sum().backward()
        sys.stderr.write("\\n")
        """
    told = flow.run(["run", "--devices", "cpu:2", flow.write("script.py", source)]).ok().stderr
    assert "\r0/3 |##  |\r1/3 |##  |\r2/3 |##  |\n" in told
    assert "batch 4 = 2 + 2" in told


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


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.234, "1.23 s"), (0.0123, "12.3 ms"), (0.000103, "103 µs")])
def test_words(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(0.5123, "0.5123"), (62.811, "62.81"), (13246.2, "13,246")])
def test_rates(rate: float, text: str) -> None:
    assert per_second(rate) == text
