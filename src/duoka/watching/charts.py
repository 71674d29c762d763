"""Charts as SVG in HTML, without a script: lines, and stacked areas.

The drawing is stretched to the page's width, so texts stand beside it in HTML, where they keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from duoka.system.messages import duration
from duoka.watching.history import Point

WIDTH, HEIGHT = 1000.0, 240.0  # of the drawing, in its own units

Segments = Sequence[Sequence[Point]]


@dataclass(frozen=True)
class Axis:
    """The axes of a chart. begin, end: times. top: the largest value. low, high: texts at its ends.

    ticks: places with texts, if `begin` and `end` are not times.
    """

    begin: float
    end: float
    top: float
    high: str
    low: str = "0"
    bottom: float = 0.0
    ticks: Sequence[tuple[float, str]] = ()

    def x(self, time: float) -> float:
        """Return the place of a time."""
        return WIDTH * (time - self.begin) / max(self.end - self.begin, 1e-9)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        return HEIGHT * (1 - (value - self.bottom) / max(self.top - self.bottom, 1e-30))


@dataclass(frozen=True)
class Line:
    """A line of a chart. style: its class in the style sheet. segments: it is interrupted between them."""

    name: str
    style: str
    segments: Segments


@dataclass(frozen=True)
class Mark:
    """A vertical line at a time, with a text."""

    time: float
    text: str


def line_path(axis: Axis, segments: Segments) -> str:
    """Return the `d` of an SVG path through these points."""
    return " ".join(
        " ".join(
            f"{'M' if place == 0 else 'L'}{axis.x(one.time):.1f} {axis.y(one.value):.1f}"
            for place, one in enumerate(points)
        )
        for points in segments
        if points
    )


def area_path(axis: Axis, lower: Segments, upper: Segments) -> str:
    """Return the `d` of an SVG path around the area between two lines with points at the same times."""
    found = []
    for below, above in zip(lower, upper, strict=True):
        if below:
            there = line_path(axis, [above])
            back = line_path(axis, [list(reversed(below))])
            found.append(f"{there} L{back[1:]} Z")
    return " ".join(found)


def line_chart(title: str, axis: Axis, lines: Sequence[Line], marks: Sequence[Mark] = (), note: str = "") -> str:
    """Return a figure with lines. note: a sentence below the title."""
    paths = "".join(
        f'<path class="line {escape(line.style)}" d="{line_path(axis, line.segments)}"/>'
        for line in lines
        if any(line.segments)
    )
    return _figure(title, note, axis, paths, [(line.name, line.style) for line in lines], marks)


def area_chart(title: str, axis: Axis, layers: Sequence[Line], marks: Sequence[Mark] = (), note: str = "") -> str:
    """Return a figure with areas on top of each other; layers: from below, each with its own values."""
    below: Segments = [[Point(one.time, 0.0) for one in points] for points in layers[0].segments]
    paths = []
    for layer in layers:
        above = [
            [Point(low.time, low.value + own.value) for low, own in zip(lows, owns, strict=True)]
            for lows, owns in zip(below, layer.segments, strict=True)
        ]
        paths.append(f'<path class="area {escape(layer.style)}" d="{area_path(axis, below, above)}"/>')
        below = above
    return _figure(title, note, axis, "".join(paths), [(layer.name, layer.style) for layer in layers], marks)


def _figure(
    title: str, note: str, axis: Axis, paths: str, legend: Sequence[tuple[str, str]], marks: Sequence[Mark]
) -> str:
    ticks = axis.ticks or ((axis.begin, "0:00"), (axis.end, duration(axis.end - axis.begin)))
    grid = "".join(
        f'<path class="grid" d="M0 {HEIGHT * part:.0f} H{WIDTH:.0f}"/>' for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    drawn = "".join(
        f'<path class="mark" d="M{axis.x(mark.time):.1f} 0 V{HEIGHT:.0f}"><title>{escape(mark.text)}</title></path>'
        for mark in marks
    )
    names = "".join(
        f'<span class="key"><i class="{escape(style)}"></i>{escape(name)}</span>' for name, style in legend
    )
    said = f"<p>{escape(note)}</p>" if note else ""
    return (
        f"<figure><figcaption><h2>{escape(title)}</h2>{said}<div>{names}</div></figcaption>"
        f'<div class="plot"><div class="y"><span>{escape(axis.high)}</span><span>{escape(axis.low)}</span></div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{grid}{paths}{drawn}</svg></div>'
        f'<div class="x">{"".join(_tick(axis, time, text) for time, text in ticks)}</div></figure>'
    )


def _tick(axis: Axis, time: float, text: str) -> str:
    part = 100 * axis.x(time) / WIDTH
    return f'<span style="left:{part:.4g}%;transform:translateX(-{part:.4g}%)">{escape(text)}</span>'
