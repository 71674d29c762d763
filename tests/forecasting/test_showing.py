from __future__ import annotations

import json
import re
from html import escape

import pytest

from duoka.forecasting.forecast import Forecast
from duoka.forecasting.showing import as_data, as_text, doubts, page, sentences, verdict
from tests.forecasting.made import forecast, run

PAYS = forecast(run(1), run(2, step=0.0055), run(4, step=0.004), run(8, step=0.0041))
DOES_NOT = forecast(run(1), run(2, step=0.020, waited=0.014))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (PAYS, "cpu:4 is the fastest here, 2.50 times as fast as cpu:1, 62% of the ideal"),
        (DOES_NOT, "cpu:1 is the fastest here; more devices do not make this script faster"),
        (forecast(run(1), run(2, step=0.0097)), "cpu:1 is the fastest here; more"),
        (
            forecast(run(1), run(2, step=0.002)),
            "none to be trusted: cpu:2 was 5.00 times as fast as cpu:1, more",
        ),
    ],
    ids=["pays", "does not", "too little", "too much"],
)
def test_the_verdict(found: Forecast, said: str) -> None:
    assert verdict(found).startswith(said)


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ((0.009, 0.009, 0.010, 0.010, 0.010), (0.006, 0.006, 0.009, 0.0095, 0.0095), "on cpu:2 and on cpu:1 overlap"),
        ((0.010,) * 5, (0.002, 0.004, 0.006, 0.008, 0.010), "the steps of cpu:2 are not alike (the middle half is 4"),
        ((0.010,) * 5, (0.006,) * 5, ""),
    ],
    ids=["overlap", "not alike", "none"],
)
def test_doubts(one: tuple[float, ...], two: tuple[float, ...], said: str) -> None:
    found = forecast(run(1, windows=one), run(2, windows=two))
    assert found.best.devices == 2
    assert said in "".join(doubts(found))
    assert list(doubts(found)) == json.loads(as_data(found))["notes"]
    assert as_text(found, "normal").count("note: ") == bool(said)


def test_sentences_are_there_where_more_are_not_faster() -> None:
    lines = as_text(PAYS, "normal").splitlines()
    assert [line for line in lines if line.startswith("cpu:")] == [
        "cpu:4: faster than cpu:1, but 62% of the ideal",
        "cpu:8: no faster than cpu:4",
    ]
    assert "cpu:2: slower than cpu:1, 2.00 times its time" in as_text(DOES_NOT, "normal")
    assert "\ncpu:2: " in as_text(PAYS, "verbose")
    assert as_text(PAYS, "quiet") == f"verdict: {verdict(PAYS)}"


def test_of_a_gpu_waiting_is_not_seen() -> None:
    text = as_text(forecast(run(1, "cuda"), run(2, "cuda", step=0.006)), "normal")
    assert text.count("not seen") == 1


def test_what_cannot_be_is_not_called_the_fastest() -> None:
    assert json.loads(as_data(forecast(run(1), run(2, step=0.002))))["fastest"] is None


def test_data() -> None:
    data = json.loads(as_data(DOES_NOT))
    assert data["fastest"] == {"name": "cpu:1", "devices": 1}
    two = data["sides"][1]
    assert (two["step"], two["waiting"], two["times_as_fast"], two["of_the_ideal"]) == (0.02, 0.014, 0.5, 0.25)
    assert two["samples_per_second"] == 64 / 0.02
    assert two["devices"] == ["CPU", "CPU"]


FOUND = forecast(run(1), run(2, step=0.0075, waited=0.0025), run(4, step=0.005), run(6, step=0.005))


def drawn(text: str, title: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a chart, as fractions of its width and height from below."""
    figure = text.split(f"<h2>{title}</h2>")[1].split("</figure>")[0]
    names = re.findall(r'<i class="c\d"></i>(.*?)</span>', figure)
    paths = re.findall(r'class="line c\d" d="([^"]*)"', figure)
    places = [re.findall(r"[ML]([\d.]+) (-?[\d.]+)", path) for path in paths]
    return {
        name: [(float(x) / 1000, 1 - float(y) / 240) for x, y in place]
        for name, place in zip(names, places, strict=True)
    }


def test_time_and_ideal_against_devices() -> None:
    text = page(FOUND)
    lines = drawn(text, "Seconds of a step, against devices")
    heights = [height for _, height in lines["measured"]]
    assert heights == pytest.approx([1, 0.75, 0.5, 0.5], abs=1e-3)
    places, ideal = zip(*lines["ideal: that of one device, divided by their number"], strict=True)
    assert places == pytest.approx([0, 1 / 2.585, 2 / 2.585, 1], abs=1e-3)  # a doubling is as wide as another
    assert ideal == pytest.approx([1, 1 / 2, 1 / 4, 1 / 6], abs=1e-3)
    assert re.findall(r"translateX[^>]*>(cpu:\d)", text)[:4] == ["cpu:1", "cpu:2", "cpu:4", "cpu:6"]


def test_the_page_says_what_the_terminal_says() -> None:
    text = page(FOUND)
    assert "<h1>train.py: cpu:4 is the fastest here, 2.00 times as fast as cpu:1" in text
    said = [escape(line.strip()) for line in sentences(FOUND, False)]
    assert said
    assert all(f"<li>{line}</li>" in text for line in said)
    assert text.count("<tr>") == 5


@pytest.mark.parametrize("found", [FOUND, forecast(run(1, samples=None), run(2, samples=None))])
def test_samples_are_drawn_if_they_are_known(found: Forecast) -> None:
    assert ("<h2>Samples a second</h2>" in page(found)) is (found is FOUND)
