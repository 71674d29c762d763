"""Pages of HTML that need nothing else, no network and no script, and charts for them as SVG: lines, stacked areas.

A chart is stretched to the page's width, so texts stand beside it in HTML, where they keep their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from duoka.system.messages import duration
from duoka.watching.history import Point

STYLE = """
:root{color-scheme:light dark;--text:#1c2024;--faint:#666e78;--back:#fff;--panel:#f5f6f8;--grid:#d9dde2}
:root{--mark:#c2185b}
@media(prefers-color-scheme:dark){:root{--text:#e6e8eb;--faint:#9aa3ad;--back:#14171a;--panel:#1d2125;--grid:#363c43;
--mark:#ff6f9f}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.05rem;margin:0}
p,li{margin:.3rem 0}.faint,figcaption p,.y,.x,.key{color:var(--faint);font-size:.85rem}
figure,section{margin:1rem 0;padding:.8rem;background:var(--panel);border-radius:.5rem}
.plot{display:flex;gap:.5rem}.plot svg{flex:1;min-width:0;height:12rem;overflow:visible}
.y{display:flex;flex-direction:column;justify-content:space-between;text-align:right;min-width:3.2rem}
.x{position:relative;height:1.3rem;margin-left:3.7rem}.x span{position:absolute;white-space:nowrap}
.key{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem;
border-radius:2px;background:var(--color)}
path{fill:none;vector-effect:non-scaling-stroke}.line{stroke:var(--color);stroke-width:2}.area{fill:var(--color)}
.grid{stroke:var(--grid);stroke-width:1}.mark{stroke:var(--mark);stroke-width:2;stroke-dasharray:5 4}
pre{overflow-x:auto;font-size:.85rem;margin:.3rem 0}summary{cursor:pointer}
.table{overflow-x:auto;white-space:nowrap}table{border-collapse:collapse;width:100%}
th,td{padding:.2rem .6rem;text-align:right}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}tr+tr{border-top:1px solid var(--grid)}
.c0{--color:#8a9099}.c1{--color:#2a9d63}.c2{--color:#e6a700}.c3{--color:#d1495b}.c4{--color:#9b5de5}.c5{--color:#2f7fd6}
.c6{--color:#e4762b}.c7{--color:#00a0a8}.c8{--color:#b05a8c}
"""


def document(title: str, body: Iterable[str], refresh: int = 0) -> str:
    """Return a page. title: a text. body: HTML. refresh: seconds after which browsers load it again; 0: never."""
    return (
        # Names and lines come from scripts, also of other machines: should one not be escaped, nothing of it runs.
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none';img-src data:;style-src 'unsafe-inline'\">"
        + (f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "")
        + f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def head(title: str, words: Sequence[str]) -> str:
    """Return the title of a page, and facts below it."""
    return f'<h1>{escape(title)}</h1>\n<p class="faint">{escape(" · ".join(words))}</p>'


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a section with a table of texts."""
    names = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<section><h2>{escape(title)}</h2><div class="table"><table><tr>{names}</tr>{lines}</table></div></section>'
    )


def listed(title: str, texts: Iterable[str]) -> str:
    """Return a section with a list of texts; nothing without one."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<section><h2>{escape(title)}</h2><ul>{lines}</ul></section>" if lines else ""


WIDTH, HEIGHT = 1000.0, 240.0  # of the drawing, in its own units

Segments = Sequence[Sequence[Point]]


@dataclass(frozen=True)
class Axis:
    """The axes of a chart."""

    begin: float  # begin and end: times, unless there are ticks
    end: float
    top: float  # the largest value
    high: str  # high and low: texts at the ends
    low: str = "0"
    bottom: float = 0.0
    ticks: Sequence[tuple[float, str]] = ()  # places with texts

    def x(self, time: float) -> float:
        return WIDTH * (time - self.begin) / max(self.end - self.begin, 1e-9)

    def y(self, value: float) -> float:
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
            f"{'M' if at == 0 else 'L'}{axis.x(point.time):.1f} {axis.y(point.value):.1f}"
            for at, point in enumerate(points)
        )
        for points in segments
        if points
    )


def area_path(axis: Axis, lower: Segments, upper: Segments) -> str:
    """Return the `d` of an SVG path around the area between two lines with points at the same times."""
    paths = []
    for below, above in zip(lower, upper, strict=True):
        if below:
            way = line_path(axis, [above])
            back = line_path(axis, [list(reversed(below))])
            paths.append(f"{way} L{back[1:]} Z")
    return " ".join(paths)


def line_chart(title: str, axis: Axis, lines: Sequence[Line], marks: Sequence[Mark] = (), note: str = "") -> str:
    """Return a figure with lines. note: a sentence below the title."""
    paths = "".join(
        f'<path class="line {escape(line.style)}" d="{line_path(axis, line.segments)}"/>'
        for line in lines
        if any(line.segments)
    )
    return _figure(title, note, axis, paths, [(line.name, line.style) for line in lines], marks)


def area_chart(title: str, axis: Axis, layers: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """Return a figure with areas on top of each other; layers: from below, each with its own values."""
    below: Segments = [[Point(point.time, 0.0) for point in points] for points in layers[0].segments]
    paths = []
    for layer in layers:
        above = [
            [Point(low.time, low.value + value.value) for low, value in zip(lows, values, strict=True)]
            for lows, values in zip(below, layer.segments, strict=True)
        ]
        paths.append(f'<path class="area {escape(layer.style)}" d="{area_path(axis, below, above)}"/>')
        below = above
    return _figure(title, "", axis, "".join(paths), [(layer.name, layer.style) for layer in layers], marks)


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
