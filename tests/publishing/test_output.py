from __future__ import annotations

import io
import os
import sys

import pytest

from duoka.publishing import output
from duoka.supervision.rings import ScriptOutput
from duoka.system.messages import Lines
from tests.publishing.made import publisher


def printed(output: ScriptOutput) -> list[tuple[str, bool]]:
    return [(line.text, line.redrawn) for _, line in output.printed(0)]


def test_lines_are_kept_and_streams_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    ours = publisher()
    output.install(ours)
    print("loss", 0.5)
    print("\n  \nin ", end="")
    sys.stderr.write("\r10%\r50%")
    sys.stderr.write("\r100%\nto err\n")
    print("parts")
    assert sys.stdout is out
    assert printed(ours.board.script_output) == [
        ("loss 0.5", False),
        ("10%", True),
        ("50%", True),
        ("100%", False),
        ("to err", False),
        ("in parts", False),
    ]
    out.flush()
    assert out.buffer.getvalue() == b"loss 0.5\n\n  \nin parts\n"  # type: ignore[attr-defined]

    ours.stop()
    print("by a process that the script has forked")
    assert len(printed(ours.board.script_output)) == 6


def test_beside_the_lines_of_duoka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both observe standard error; the one that ends first does not end the other."""
    read, write = os.pipe()
    err = os.fdopen(write, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "__stderr__", err)
    ours = publisher()
    output.install(ours)
    with Lines() as lines:
        print("one", file=sys.stderr)
        lines.say("said")
    print("two", file=sys.stderr)
    assert [text for text, _ in printed(ours.board.script_output)] == ["one", "two"]
    err.close()
    with os.fdopen(read) as file:
        assert file.read() == "one\nduoka: said\ntwo\n"
