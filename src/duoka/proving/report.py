"""A proof as a page of HTML: differences by step and tensor as charts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from duoka.proving.comparing import Gap
from duoka.proving.proof import Outcome, Proof
from duoka.proving.showing import as_verdict, cells, columns, sentences, title
from duoka.watching.history import Point
from duoka.watching.html import Axis, Line, document, head, line_chart, listed, table

MOST_LINES = 7  # tensors in a chart
LEAST, MOST = 1e-12, 1e12  # of differences in a chart


def page(proof: Proof, target: str) -> str:
    """Return the page: the verdict, for each run its differences and losses by step, and the table."""
    body = [
        head(f"{target}: {as_verdict(proof)}", [title(proof)]),
        listed("What stands out", (line.strip() for one in proof.outcomes for line in sentences(proof, one))),
        *(chart for outcome in proof.outcomes for chart in _charts(proof, outcome)),
        table("Each run", columns(), [cells(outcome) for outcome in proof.outcomes]),
    ]
    return document(f"{target}: proof", body)


def _charts(proof: Proof, outcome: Outcome) -> Iterator[str]:
    name, gaps = outcome.run.name, [gap for gap in outcome.comparison.gaps if _is_drawn(gap)]
    end = float(max(1, proof.steps))
    ticks = ((0.0, "step 0"), (end, f"step {proof.steps:,}"))
    if gaps:
        yield _differences(proof, name, gaps, end, ticks)
    losses = outcome.comparison.losses
    known = [loss for both in losses for loss in both if math.isfinite(loss)]
    if known:
        low, high = min(known), max(known)
        room = (high - low) or abs(high) or 1.0
        axis = Axis(0.0, end, high, f"{high:.4g}", f"{low:.4g}", high - room, ticks)
        names = (proof.request.first.name, "c0"), (name, "c5")
        lines = [
            Line(who, style, [[Point(float(step), loss) for step, loss in enumerate(of, 1) if math.isfinite(loss)]])
            for (who, style), of in zip(names, losses, strict=True)
        ]
        yield line_chart(f"{name}: loss", axis, lines)


def _differences(proof: Proof, name: str, gaps: list[Gap], end: float, ticks: tuple[tuple[float, str], ...]) -> str:
    """Return a chart of the tensors that differ most, on a logarithmic axis, with the tolerance of the first one.

    end: the last step. ticks: (step, label) of each tick of the step axis.
    """
    worst: dict[str, float] = {}
    for gap in gaps:
        worst[gap.name] = max(worst.get(gap.name, 0.0), gap.relative)
    shown = sorted(worst, key=lambda tensor: -worst[tensor])[:MOST_LINES]
    lines = [
        Line(tensor, f"c{place + 1}", [[_point(gap.step, gap.relative) for gap in gaps if gap.name == tensor]])
        for place, tensor in enumerate(shown)
    ]
    if proof.bound is not None:
        limits = [(gap, proof.bound.allowed(gap) / (gap.size or 1.0)) for gap in gaps if gap.name == shown[0]]
        points = [_point(gap.step, limit) for gap, limit in limits if limit > 0]
        lines.append(Line(f"{shown[0]} may differ by", "c8", [points]))
    values = [point.value for line in lines for points in line.segments for point in points]
    low, high = math.floor(min(values)), math.floor(max(values)) + 1
    axis = Axis(0.0, end, high, f"1e{high}", f"1e{low}", low, ticks)
    note = f"Of the tensor's largest number; the {len(shown)} of {len(worst)} tensors that differ most."
    return line_chart(f"{name}: differences from {proof.request.first.name}", axis, lines, note=note)


def _is_drawn(gap: Gap) -> bool:
    return not gap.problem and math.isfinite(gap.relative) and gap.relative > 0


def _point(step: int, value: float) -> Point:
    return Point(float(step), math.log10(min(MOST, max(LEAST, value))))
