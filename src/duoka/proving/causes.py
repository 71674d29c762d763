"""Why two runs part: found by running again with one thing changed, and told where that cannot be.

Each cause is a sentence for a person. What was tried and shown comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from duoka.plan import Kind, Plan
from duoka.proving.bounds import Bound, Verdict, judge
from duoka.proving.comparing import Comparison, Gap
from duoka.proving.sides import Side

# An option that gives other numbers: where a plan has it, its value, the value that does not, and what it does.
OPTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("batch_norm", "local", "whole", "BatchNorm takes the statistics of each share of the batch"),
    ("randomness", "worker", "whole", "each rank draws its own random numbers inside of models"),
    ("loading", "shared", "auto", "random augmentation is seeded by sample, not drawn from the one stream"),
)

Compare = Callable[[Side], Comparison]  # runs a side, and compares it with the first run


@dataclass(frozen=True, slots=True)
class Unsteady:
    """What the first run is to itself, run again. text: why it has not the same bits; empty where it has."""

    verdict: Verdict
    text: str


def of_difference(side: Side, found: Comparison, bound: Bound, again: Compare) -> Iterator[str]:
    """Why a side is not what the first run is, beyond rounding; the first run is steady."""
    tried = list(_by_option(side, bound, again))
    yield from tried
    if tried:
        return
    if side.plan.world_size > 1 and not _alike(found, again(side)):
        yield f"{side.name} gives other numbers each time it is run: its ranks depend on time or on chance"
    yield from _by_data(side, found)


def amplification(gap: Gap) -> str:
    """What rounding alone does to this script, where that is much. gap: of a reference run."""
    return (
        f"rounding is amplified: with weights moved by one unit in the last place, and nothing else, {gap.name} is "
        f"{gap.largest:.1e} apart after step {gap.step}, which is {_percent(gap.largest, gap.moved)} of what it has "
        "learned; typical are a bias before a normalisation under Adam, a high learning rate, a chaotic recurrence"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "all"


def of_itself(first: Side, comparison: Comparison) -> Unsteady:
    """What parts two runs of the very same."""
    text = "" if comparison.same_bits else _unsteady(first, comparison)
    return Unsteady(judge(comparison, Bound([])).verdict, text)


def _unsteady(first: Side, comparison: Comparison) -> str:
    data, gap, name = comparison.data, _first_gap(comparison), first.name
    if gap is not None and gap.step == 0 and not gap.is_buffer:
        return (
            f"{name} gives other numbers each time it is run, from the start: {gap.name} is another before the first "
            "step, so something that is drawn for it is not seeded (a generator of its own, time, a process id)"
        )
    if data is not None and (gap is None or data.step <= max(gap.step, 1)):
        return (
            f"{name} gives other numbers each time it is run: it is given other data in step {data.step} "
            f"({data.text}), so its order or its augmentation is not seeded (time, a process id, threads)"
        )
    if gap is None:
        return f"{name} makes another number of steps each time it is run"
    return (
        f"{name} gives other numbers each time it is run: {gap.name} is {gap.largest:.1e} apart after step "
        f"{gap.step} with the same data, so a kernel is not deterministic, or something draws unseeded; "
        "torch.use_deterministic_algorithms(True) names the kernel"
    )


def _first_gap(comparison: Comparison) -> Gap | None:
    """The first gap; of those before the first step a parameter's, which no forward pass has changed."""
    found = comparison.gaps
    return next((gap for gap in found if gap.step == 0 and not gap.is_buffer), found[0] if found else None)


def _by_option(side: Side, bound: Bound, again: Compare) -> Iterator[str]:
    """The options without which the verdict is a better one: each by itself, and if that is not enough, all."""
    asked = [option for option in OPTIONS if getattr(side.plan, option[0]) == option[1]]
    if side.plan.kind is Kind.DISTRIBUTED or side.plan.world_size == 1:
        return
    for name, value, neutral, effect in asked:
        changed: dict[str, Any] = {name: neutral}
        if _verdict(side, changed, bound, again) != "different":
            yield f"{_flag(name)} {value}: {effect}; with {_flag(name)} {neutral} nothing but rounding is left"
            return
    if len(asked) > 1:
        all_changed = {name: neutral for name, _, neutral, _ in asked}
        if _verdict(side, all_changed, bound, again) != "different":
            flags = [f"{_flag(name)} {value}" for name, value, _, _ in asked]
            yield f"{' and '.join(flags)}, together: without them nothing but rounding is left"


def _verdict(side: Side, changed: dict[str, Any], bound: Bound, again: Compare) -> Verdict:
    plan: Plan = replace(side.plan, **changed)
    flags = " ".join(f"{_flag(name)} {value}" for name, value in changed.items())
    return judge(again(Side(f"{side.name} {flags}", plan)), bound).verdict


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _alike(one: Comparison, other: Comparison) -> bool:
    """Whether two runs of a side are equally far from the first run, in every place."""
    return one.gaps == other.gaps and one.steps == other.steps


def _by_data(side: Side, found: Comparison) -> Iterator[str]:
    data = found.data
    first = _first_gap(found)
    if data is not None and (first is None or data.step <= max(first.step, 1)):
        if side.plan.kind is Kind.DISTRIBUTED:
            yield (
                f"the script makes the batches of its ranks itself, and they are not those of one rank: {data.text} "
                f"in step {data.step}"
            )
        elif data.kind == "ranks":
            yield f"{data.text}: what the script trains on depends on the rank or the process"
        else:
            yield f"it is given other data from step {data.step} on: {data.text}"
    elif first is not None and first.step == 0 and not first.is_buffer:
        yield f"the models are others before the first step: {first.name} is"
