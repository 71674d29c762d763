from __future__ import annotations

import json

import pytest

from duoka.forecasting.memory.showing import as_data, as_text, choice, doubts, in_bytes, verdict
from tests.forecasting.memory.made import MB, Story, forecast


def story(batch: int | None = 8) -> Story:
    made = Story(batch)
    made.alive(10, "parameter", 0)
    made.alive(20, "state", 0)
    made.make(10, "gradient", 0)
    made.make(40, "rows")
    made.now("step")
    return made


# On one device 80 MB; with ddp on two 60, on four 50.
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (1000, "ddp on cpu:4, 50 MB of each device; cpu:1 is enough"),
        (70, "ddp on cpu:4, 50 MB of each device; cpu:2 is enough"),
        (10, "nothing fits on cpu:4: the least is"),
    ],
)
def test_the_verdict(limit: int, said: str) -> None:
    assert verdict(forecast(story(), [limit * MB] * 3)).startswith(said)


def test_fsdp_where_ddp_does_not_fit() -> None:
    found = forecast(story(), [55 * MB] * 3)
    said = verdict(found)
    assert said.startswith("fsdp on cpu:4, ")
    assert "(ddp needs 50 MB, more than 90% of its 55 MB)" in said


def test_more_devices_where_nothing_fits() -> None:
    assert "; 8 devices of this size are enough, with fsdp" in verdict(forecast(story(), [50 * MB] * 3))
    assert "; more devices are not enough: use a smaller batch" in verdict(forecast(story(), [10 * MB] * 3))


def test_the_choice_of_a_run() -> None:
    found = forecast(story(), [54 * MB], devices=(4,))
    need = found.advice(4)
    assert need is not None
    said = choice(found, need)
    assert said.startswith("--strategy auto: fsdp needs "), said
    assert said.endswith("of each device's 54 MB (ddp needs 50 MB, more than 90% of its 54 MB)")


def test_one_step_is_enough_to_choose_ddp() -> None:
    made = story()
    made.steps, made.bound = 1, 70 * MB
    found = forecast(made, [100 * MB], devices=(2,))
    need = found.advice(2)
    assert need is not None
    assert choice(found, need) == "--strategy auto: ddp needs at most 70 MB of each device's 100 MB"


def test_the_table_and_the_data_say_the_same() -> None:
    found = forecast(story(), [1000 * MB, None, 10 * MB])
    text = as_text(found, "normal").splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text if line.startswith("│")]
    data = json.loads(as_data(found))
    assert [row[:2] for row in rows[:3]] == [["cpu:1", "single"], ["cpu:2", "ddp"], ["cpu:2", "fsdp"]]
    assert [row[2] for row in rows] == [in_bytes(one["peak"]) for one in data["layouts"]]
    assert [row[3:] for row in rows[:2]] == [["1 GB", "yes"], ["not known", ""]]
    assert all(row[3:] == ["10 MB", "no"] for row in rows[-3:])
    assert data["take"] is None
    assert data["one_device"]["parameters"] == 10 * MB
    assert text[-1] == f"verdict: {verdict(found)}" == as_text(found, "quiet")


@pytest.mark.parametrize(("batch", "said"), [(None, "no model was called"), (3, "a batch of 3 is computed whole")])
def test_doubts(batch: int | None, said: str) -> None:
    assert next(doubts(forecast(story(batch), [None] * 3))).startswith(said)


@pytest.mark.parametrize(
    ("size", "text"), [(1234, "1.23 kB"), (12.34e6, "12.3 MB"), (997.3e6, "997 MB"), (80e9, "80 GB")]
)
def test_sizes(size: float, text: str) -> None:
    assert in_bytes(size) == text
