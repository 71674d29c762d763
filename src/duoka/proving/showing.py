"""Format a proof: a table and sentences for the user, JSON, or a page of HTML with charts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from duoka.proving.comparing import OF_MOVE, TIMES, ULPS, Gap, Judgement
from duoka.proving.proof import REFERENCES, Outcome, Proof
from duoka.trials.runner import render_table
from duoka.watching.history import Point
from duoka.watching.html import Axis, Line, document, head, line_chart, listed, table

WORDS = {"bits": "identical bits", "rounding": "equal to rounding", "different": "different"}
COLUMNS = "", "verdict", "steps", "largest", "relative", "at step: in", "bits differ at step: in", "data"


def as_text(proof: Proof, verbosity: str) -> str:
    """Format the whole result; with `quiet`, only the verdict."""
    last = f"verdict: {as_verdict(proof)}"
    if verbosity == "quiet":
        return last
    parts = [render_table(title(proof), COLUMNS, map(cells, proof.outcomes))]
    if verbosity == "verbose":
        parts += [_steps(proof, outcome) for outcome in proof.outcomes]
    parts += [line for outcome in proof.outcomes for line in sentences(outcome)]
    if proof.bound is not None:
        parts.append(_rounding(proof))
    return "\n".join([*parts, last])


def title(proof: Proof) -> str:
    """Describe what was compared."""
    steps = f"{proof.steps} step{'s' * (proof.steps != 1)}"
    return f"compared with {proof.request.first.name}, {steps}, seed {proof.request.seed}"


def cells(outcome: Outcome) -> list[str]:
    """Return a row of the table."""
    judged, comparison = outcome.judged, outcome.comparison
    worst = judged.worst
    return [
        outcome.run.name,
        WORDS[judged.verdict],
        str(comparison.steps[1]),
        _number(worst.largest) if worst else "0",
        _number(worst.relative) if worst else "0",
        _step_and_name(worst) if worst else "",
        _step_and_name(judged.parts) if judged.parts else "nowhere",
        "the same" if comparison.data is None else f"part in step {comparison.data.step}",
    ]


def _steps(proof: Proof, outcome: Outcome) -> str:
    """Return a table with a line per step: the tensor with the largest gap, its limit, and the losses."""
    names = ("step", "largest", "relative", "in", "allowed", "loss", "loss of the other run")
    rows = []
    for step in range(min(outcome.comparison.steps) + 1):
        gaps = [gap for gap in outcome.comparison.gaps if gap.step == step and gap.kind != "gradient"]
        worst = max(gaps, key=lambda gap: (gap.relative, gap.largest), default=None)
        allowed = proof.bound.allowed(worst) if worst and proof.bound else 0.0
        size = (_number(worst.largest), _number(worst.relative), worst.name) if worst else ("0", "0", "")
        losses = (f"{of[step - 1]:.6g}" if step and step <= len(of) else "" for of in outcome.comparison.losses)
        rows.append((str(step), *size, _number(allowed), *losses))
    return render_table(f"{outcome.run.name}, step by step", names, rows)


def sentences(outcome: Outcome) -> list[str]:
    """Return the verdict about a run, the first difference and its most likely cause."""
    judged, name = outcome.judged, outcome.run.name
    if judged.verdict == "different":
        lines = [f"{name}: different; the first difference: {_first(judged)}"]
    else:
        lines = [f"{name}: {WORDS[judged.verdict]}"]
    if outcome.run.plan.world_size == 1 and outcome.run.plan.strategy == "single" and judged.verdict == "bits":
        lines.append("  note: this is one device; --devices cpu:2, for example, asks for more")
    if outcome.cause or judged.verdict == "different":
        lines.append(f"  cause: {outcome.cause or 'none that duoka can tell; --verbose shows all steps'}")
    return lines


def _first(judged: Judgement) -> str:
    first = judged.first
    if first is None:
        return judged.why
    when = (
        f"step {first.step}"
        if first.step
        else "the forward pass of step 1"
        if first.kind == "buffer"
        else "the start"
    )
    where = f"{when}, {first.name}"
    if first.problem:
        return f"{where} {first.problem}"
    apart = f"{where} is {_number(first.largest)} apart, where rounding may make it {_number(judged.allowed)}"
    return f"{apart}; {judged.why}" if judged.why else apart


def _rounding(proof: Proof) -> str:
    return (
        f"rounding: at most {ULPS} units in the last place of a tensor's largest number, {OF_MOVE:g} of how far the "
        "steps have moved it (of a gradient: of its largest number), or "
        f"{TIMES} times what moving all weights by one unit in the last place ({REFERENCES} runs), or adding up the "
        f"batch in another order on one device, does to {proof.request.first.name}"
    )


def as_verdict(proof: Proof) -> str:
    """Name the worst verdict, and the wanted one."""
    wanted = WORDS[proof.request.want]
    holds = f"as wanted ({wanted})" if proof.holds else f"wanted was: {wanted}"
    return f"{WORDS[proof.verdict]}, {holds}"


def _step_and_name(gap: Gap) -> str:
    return f"{gap.step}: {gap.name}"


def _number(value: float) -> str:
    return f"{value:.2g}" if value else "0"


def as_data(proof: Proof) -> str:
    """Return the proof as JSON; infinite values and NaN are null."""
    runs = [_run_data(proof, outcome) for outcome in proof.outcomes]
    data = {
        "first": proof.request.first.name,
        "steps": proof.steps,
        "seed": proof.request.seed,
        "want": proof.request.want,
        "verdict": proof.verdict,
        "holds": proof.holds,
        "rounding": {"units_in_the_last_place": ULPS, "of_movement": OF_MOVE, "times_reference": TIMES},
        "sides": runs,
    }
    return json.dumps(data, indent=2, allow_nan=False)


def _run_data(proof: Proof, outcome: Outcome) -> dict[str, Any]:
    judged, comparison = outcome.judged, outcome.comparison
    data = comparison.data
    return {
        "name": outcome.run.name,
        "devices": [str(device) for device in outcome.run.plan.devices],
        "verdict": judged.verdict,
        "steps": comparison.steps[1],
        "largest": _gap(judged.worst, proof),
        "parts": _gap(judged.parts, proof),
        "first": _gap(judged.first, proof),
        "why": judged.why,
        "data": None if data is None else {"step": data.step, "kind": data.kind, "text": data.text},
        "losses": [[_finite(loss) for loss in losses] for losses in comparison.losses],
        "cause": outcome.cause,
        "gaps": [_gap(gap, proof) for gap in comparison.gaps],
    }


def _gap(gap: Gap | None, proof: Proof) -> dict[str, Any] | None:
    if gap is None:
        return None
    data = {"step": gap.step, "tensor": gap.name, "absolute": _finite(gap.largest)}
    data |= {"relative": _finite(gap.relative), "problem": gap.problem}
    return data | {"allowed": _finite(proof.bound.allowed(gap)) if proof.bound else None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


MOST_LINES = 7  # tensors in a chart
LEAST, MOST = 1e-12, 1e12  # of differences in a chart


def page(proof: Proof, target: str) -> str:
    """Return the page: the verdict, for each run its differences and losses by step, and the table."""
    body = [
        head(f"{target}: {as_verdict(proof)}", [title(proof)]),
        listed("What stands out", (line.strip() for outcome in proof.outcomes for line in sentences(outcome))),
        *(chart for outcome in proof.outcomes for chart in _charts(proof, outcome)),
        table("Each run", COLUMNS, [cells(outcome) for outcome in proof.outcomes]),
    ]
    return document(f"{target}: proof", body)


def _charts(proof: Proof, outcome: Outcome) -> Iterator[str]:
    name, numbers = outcome.run.name, (gap for gap in outcome.comparison.gaps if not gap.problem)
    gaps = [gap for gap in numbers if 0 < gap.relative < math.inf]
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
        Line(tensor, f"c{number + 1}", [[_point(gap.step, gap.relative) for gap in gaps if gap.name == tensor]])
        for number, tensor in enumerate(shown)
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


def _point(step: int, value: float) -> Point:
    return Point(float(step), math.log10(min(MOST, max(LEAST, value))))
