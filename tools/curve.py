"""`python tools/curve.py`: draw the curve of examples/crnn out of the table of its README, which is from a real run.

Writes docs/crnn.svg: accuracy by word and by character after each epoch.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "examples/crnn/README.md", ROOT / "docs/crnn.svg"
ROW = re.compile(r"^\| (\d+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
LEFT, TOP, WIDTH, HEIGHT = 52, 16, 420, 200  # of the field, in pixels
LINES = (("words", "#e08b3e", 1, 78), ("characters", "#4a8fd9", 2, 30))  # name, colour, column, height of its label
STYLE = """<style>
  text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #24292f } .end { text-anchor: end }
  .mid { text-anchor: middle } .axis { stroke: #6e7781; stroke-width: 1; fill: none } .grid { stroke: #6e778144 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .axis { stroke: #9aa4af } }
</style>"""


def picture(page: str) -> str:
    """The SVG of a page's table."""
    rows = [tuple(map(float, row)) for row in ROW.findall(page)]
    assert len(rows) > 1, "there is no table of epochs"

    def place(epoch: float, accuracy: float) -> tuple[float, float]:
        return LEFT + WIDTH * (epoch - 1) / (len(rows) - 1), TOP + HEIGHT * (1 - accuracy)

    parts = [f"<title>Accuracy after each epoch: {rows[-1][1]:.3f} of words at the end</title>", STYLE]
    for percent in range(0, 101, 25):
        y = TOP + HEIGHT * (1 - percent / 100)
        parts.append(f'<path class="grid" d="M{LEFT} {y:g}H{LEFT + WIDTH}"/>')
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{y + 4:g}">{percent}%</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{TOP + HEIGHT}H{LEFT + WIDTH}"/>')
    for epoch, *_ in rows:
        parts.append(f'<text class="mid" x="{place(epoch, 0)[0]:g}" y="{TOP + HEIGHT + 18}">{epoch:g}</text>')
    parts.append(f'<text class="mid" x="{LEFT + WIDTH / 2:g}" y="{TOP + HEIGHT + 36}">epoch</text>')
    for name, colour, column, label in LINES:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(row[0], row[column]) for row in rows))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2.5" points="{points}"/>')
        parts.append(f'<circle cx="{LEFT + 250}" cy="{TOP + HEIGHT - label - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 262}" y="{TOP + HEIGHT - label}">{name} read right</text>')
    size = f'width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + 46}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>', *parts, "</svg>\n"])


def main() -> None:
    """Draw it."""
    PICTURE.write_text(picture(PAGE.read_text()), encoding="utf-8")


if __name__ == "__main__":
    main()
