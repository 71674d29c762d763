from __future__ import annotations

from dataclasses import replace

import pytest

from duoka.cli.forecast import _growing, _named, forecast
from duoka.cli.trial import decide_and_take
from duoka.errors import AskedError, OptionError
from duoka.hardware.choice import choose
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory
from duoka.hardware.spec import parse
from duoka.planning.options import Options
from duoka.planning.plan import Kind, Plan
from duoka.script import Target
from tests.forecasting.made import plan

GPUS = Inventory(tuple(Gpu(index, f"GPU-{index}", "H200", 2**37) for index in range(8)))


def chosen(devices: str, visible: str | None = None) -> list[list[int | None]]:
    """Return the GPUs of each plan, on a machine with eight."""

    def decided(words: str) -> Plan:
        return plan(choose(parse(words), replace(GPUS, visible=visible)).devices)

    return [[device.index for device in one.devices] for one in _growing(devices, decided)]


@pytest.mark.parametrize(
    ("devices", "visible", "found"),
    [
        ("0,3,5", None, [[0], [0, 3], [0, 3, 5]]),
        ("4", None, [[0], [0, 1], [0, 1, 2, 3]]),
        ("auto", "5,2,7", [[5], [5, 2], [5, 2, 7]]),
        ("cpu:5", None, [[None] * count for count in (1, 2, 4, 5)]),
    ],
)
def test_powers_of_two_and_all(devices: str, visible: str | None, found: list[list[int | None]]) -> None:
    assert chosen(devices, visible) == found


@pytest.mark.parametrize(
    ("weights", "measures", "names"),
    [
        ((1.0, 3.0), True, ["cuda:5", "0,5, even rows", "0,5, rows as measured"]),
        ((), True, ["cuda:0", "0,5, even rows", "0,5, rows as measured"]),
        ((2.0, 1.0), False, ["cuda:0", "0,5, even rows", "0,5, rows 2 : 1"]),
    ],
)
def test_uneven_shares_are_compared_with_the_fastest_alone_and_with_even_ones(
    weights: tuple[float, ...], measures: bool, names: list[str]
) -> None:
    def decided(words: str) -> Plan:
        made = plan(choose(parse(words), GPUS).devices)
        return replace(made, weights=weights, measures_rows=measures) if len(made.devices) > 1 else made

    plans = _growing("0,5", decided)
    assert [_named(one, plans) for one in plans] == names
    assert [(one.weights, one.measures_rows) for one in plans[1:]] == [((), False), (weights, measures)]


def test_one_device_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(
        OptionError, match=r"--devices must be several devices, but is '3,'; here it is one \(GPU 3\)"
    ):
        chosen("3,")


@pytest.mark.parametrize(("either", "hint"), [(True, True), (False, False)])
def test_ranks_of_its_own(either: bool, hint: bool) -> None:
    own = replace(plan((Device("cpu"),) * 2), kind=Kind.DISTRIBUTED, kind_reason="a.py:1 reads RANK")
    own = replace(own, kind_can_be_either=either)
    with pytest.raises(AskedError, match="makes its ranks") as caught:
        _growing("cpu:2", lambda words: own)
    assert ("--kind plain" in str(caught.value)) == hint


def test_no_strategy_is_chosen() -> None:
    with pytest.raises(OptionError, match="--strategy must be named for duoka forecast, but is 'auto'"):
        decide_and_take("forecast", Options(Target("train.py"), strategy="auto"), lambda decided: [])


def test_steps_are_of_times_alone() -> None:
    with pytest.raises(OptionError, match="--steps must be left out with --memory, but is 20"):
        forecast(steps=20, memory=True, device_memory=None, machines=1, as_json=False)
