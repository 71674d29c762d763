"""`duoka run --strategy auto`, with devices of a given memory."""

from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.forecasting.memory.test_forecast import SCRIPT

PRINTING = SCRIPT.replace("    open", "    print(optimizer.param_groups[0]['params'][0].sum().item())\n    open")


@pytest.mark.parametrize(
    ("memory", "strategy", "why"),
    [
        ("100MB", "ddp", "ddp needs at most "),  # told by one step
        ("22MB", "fsdp", "(ddp needs 20"),
    ],
)
def test_the_first_strategy_that_fits_is_taken(flow: Flow, memory: str, strategy: str, why: str) -> None:
    script = flow.write("train.py", PRINTING)
    expected = flow.python([script]).ok().stdout.splitlines()
    flow.folder.joinpath("made.txt").unlink()
    words = ["run", "--strategy", "auto", "--device-memory", memory, "--devices", "cpu:2", script]
    result = flow.run(words).ok()
    assert f"strategy {strategy}, plain script" in result.stderr
    assert f"duoka: --strategy auto: {strategy} needs " in result.stderr
    assert why in result.stderr
    assert [float(line) for line in result.stdout.splitlines()] == pytest.approx([*map(float, expected)], rel=1e-4)
    assert sorted(path.name for path in flow.folder.iterdir()) == ["made.txt", "train.py"]


def test_where_nothing_fits_the_script_is_not_started(flow: Flow) -> None:
    script = flow.write("train.py", PRINTING)
    result = flow.run(["run", "--strategy", "auto", "--device-memory", "9MB", "--devices", "cpu:2", script])
    assert result.returncode == 2
    assert "error: --strategy auto: nothing fits on cpu:2: the least is " in result.stderr
    assert "devices of this size are enough, with fsdp" in result.stderr
    assert result.stdout == ""
    assert [path.name for path in flow.folder.iterdir()] == ["train.py"]


def test_a_script_that_reads_its_input_or_fails_is_named_as_such(flow: Flow) -> None:
    script = flow.write("train.py", "print(input())\n")
    result = flow.run(["run", "--strategy", "auto", "--devices", "cpu:2", script], stdin="text\n")
    assert result.returncode == 1
    assert "EOFError" in result.stderr
    assert "--strategy ddp or fsdp starts the script at once" in result.stderr


def test_a_size_without_the_choice(flow: Flow) -> None:
    script = flow.write("train.py", PRINTING)
    result = flow.run(["run", "--device-memory", "9MB", script])
    assert result.returncode == 2
    assert "--strategy must be auto if --device-memory is given" in result.stderr
