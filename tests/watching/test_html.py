from __future__ import annotations

import re

import pytest

from duoka.watching.history import Point
from duoka.watching.html import (
    HEIGHT,
    WIDTH,
    Axis,
    Line,
    Mark,
    area_chart,
    area_path,
    line_chart,
    line_path,
)

AXIS = Axis(begin=100.0, end=200.0, top=4.0, high="4 s")
FIRST = [Point(100.0, 0.0), Point(150.0, 4.0), Point(175.0, 1.0)]


def points(path: str) -> list[tuple[float, float]]:
    """The times and values that a path of `AXIS` shows."""
    places = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)
    return [(100 + float(x) / WIDTH * 100, 4 * (1 - float(y) / HEIGHT)) for x, y in places]


def test_a_path_shows_its_points() -> None:
    path = line_path(AXIS, [FIRST, [], [Point(190.0, 2.0), Point(200.0, 3.0)]])
    assert path.count("M") == 2  # interrupted
    assert points(path) == [pytest.approx(one) for one in [*FIRST, (190.0, 2.0), (200.0, 3.0)]]


def test_an_area_lies_between_two_lines() -> None:
    upper = [Point(time, value + 1) for time, value in FIRST]
    path = area_path(AXIS, [FIRST], [upper])
    assert path.endswith(" Z")
    assert points(path) == [pytest.approx(one) for one in [*upper, *reversed(FIRST)]]


def test_layers_are_stacked() -> None:
    layers = [Line("a", "c1", [FIRST]), Line("b", "c2", [[Point(time, 2.0) for time, _ in FIRST]])]
    chart = area_chart("parts", AXIS, layers)
    low, high = re.findall(r'class="area c\d" d="([^"]*)"', chart)
    assert points(low) == [pytest.approx(one) for one in [*FIRST, *((time, 0.0) for time, _ in reversed(FIRST))]]
    assert [value for _, value in points(high)] == pytest.approx([2.0, 6.0, 3.0, 1.0, 4.0, 0.0])


def test_a_chart_has_marks_and_no_code_of_the_script() -> None:
    chart = line_chart("<script>", AXIS, [Line("<b>", "c1", [FIRST])], [Mark(125.0, '"fault" <i>')])
    assert '<path class="mark" d="M250.0 0 V240"><title>&quot;fault&quot; &lt;i&gt;</title>' in chart
    assert "<script>" not in chart
    assert "<b>" not in chart
    assert "<span>4 s</span><span>0</span>" in chart
    assert re.findall(r'<span style="left:(\d+)%;[^>]*>(.*?)</span>', chart) == [("0", "0:00"), ("100", "1:40")]


def test_places_that_are_no_times() -> None:
    chart = line_chart("x", Axis(0.0, 4.0, 1.0, "1", ticks=((0.0, "one"), (1.0, "<two>"))), [])
    assert re.findall(r'<span style="left:(\d+)%;[^>]*>(.*?)</span>', chart) == [("0", "one"), ("25", "&lt;two&gt;")]
