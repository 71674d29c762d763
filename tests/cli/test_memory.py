from __future__ import annotations

from pathlib import Path

import pytest

from duoka.cli.memory import forecast_memory, powers_below
from duoka.errors import OptionError
from duoka.planning.options import Options
from duoka.script import Target


def test_powers_of_two() -> None:
    assert list(powers_below(8)) == [1, 2, 4]
    assert list(powers_below(1)) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "auto"}, "--strategy must be left out, but is 'auto'"),
        ({"strategy": "fsdp"}, r"--strategy must be left out, but is 'fsdp'; every strategy is compared"),
        ({"checkpoint_activations": True}, "--checkpoint-activations must be left out"),
        ({"shares": 4}, "--shares must be left out"),
        ({"report": Path("a.html")}, "--report must be left out, but is 'a.html'; --json gives data"),
    ],
)
def test_options_of_one_strategy_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        forecast_memory(Options(Target("a.py"), **given), None, 1, "normal")  # type: ignore[arg-type]


def test_a_wrong_size() -> None:
    with pytest.raises(OptionError, match="--device-memory must be a size such as 80GB"):
        forecast_memory(Options(Target("a.py")), "80", 1, "normal")
