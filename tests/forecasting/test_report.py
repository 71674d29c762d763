from __future__ import annotations

import re
from html import escape

import pytest

from duoka.forecasting.forecast import Forecast
from duoka.forecasting.report import page
from duoka.forecasting.showing import sentences
from tests.forecasting.made import forecast, run

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
