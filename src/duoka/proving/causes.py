"""Why two runs part: found by running again with one thing changed, and told where that cannot be.

Each cause is a sentence for a person. What was tried and shown comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from duoka.plan import Kind, Plan
from duoka.proving.bounds import Bound, Judged, Verdict, judge
from duoka.proving.comparing import Comparison
from duoka.proving.sides import Side

# An option that gives other numbers: where a plan has it, its value, the value that does not, and what it does.
OPTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("batch_norm", "local", "whole", "BatchNorm takes the statistics of each share of the batch"),
    ("randomness", "worker", "whole", "each rank draws its own random numbers inside of models"),
    ("loading", "shared", "auto", "random augmentation is seeded by sample, not drawn from the one stream"),
)

RANKING: tuple[Verdict, ...] = ("bits", "rounding", "different")

Compare = Callable[[Side], Comparison]  # runs a side, and compares it with the first run


def of_difference(first: Side, side: Side, found: Comparison, bound: Bound, again: Compare) -> Iterator[str]:
    """Why `side` is not what `first` is, beyond rounding."""
    unsteady = _of_itself(first, again)
    if unsteady:
        yield unsteady
        return
    tried = list(_by_option(side, bound, again))
    yield from tried
    if tried:
        return
    if side.plan.world_size > 1 and not judged_alike(found, again(side)):
        yield f"{side.name} gives other numbers each time it is run: its ranks depend on time or on chance"
    yield from _by_data(side, found)
    if judge(found, bound).first is not None and bound.amplified is not None:
        yield amplification(bound)


def of_bits(first: Side, side: Side, found: Comparison, bound: Bound, again: Compare) -> Iterator[str]:
    """Why `side` does not have the bits of `first`, where it is equal to rounding."""
    unsteady = _of_itself(first, again)
    if unsteady:
        yield unsteady
    elif side.plan.world_size > 1 or side.plan.threads != first.plan.threads:
        yield "sums over the batch are added in another order on another number of devices or threads"
    if bound.amplified is not None:
        yield amplification(bound)


def amplification(bound: Bound) -> str:
    """What rounding alone does to this script, where that is much."""
    gap = bound.amplified
    assert gap is not None
    return (
        f"rounding is amplified: with weights moved by one unit in the last place, and nothing else, {gap.name} is "
        f"{gap.largest:.1e} apart after step {gap.step}, as far as {_percent(gap.largest, gap.moved)} of what it has "
        "learned; typical are a bias before a normalisation under Adam, a high learning rate, a chaotic recurrence"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "all"


def _of_itself(first: Side, again: Compare) -> str:
    """What parts two runs of the very same; empty where they have the same bits."""
    comparison = again(first)
    if comparison.same_bits:
        return ""
    data, gap = comparison.data, comparison.gaps[0] if comparison.gaps else None
    name = first.name
    if gap is not None and gap.step == 0:
        return (
            f"{name} gives other numbers each time it is run, from the start: {gap.name} is another before the first "
            "step, so something that is drawn for it is not seeded (a generator of its own, time, a process id)"
        )
    if data is not None and (gap is None or data.step <= gap.step):
        return (
            f"{name} gives other numbers each time it is run: it is given other data in step {data.step} "
            f"({data.text}), so its order or its augmentation is not seeded (time, a process id, threads)"
        )
    assert gap is not None
    return (
        f"{name} gives other numbers each time it is run: {gap.name} is {gap.largest:.1e} apart after step "
        f"{gap.step} with the same data, so a kernel is not deterministic, or something draws unseeded; "
        "torch.use_deterministic_algorithms(True) names the kernel"
    )


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


def judged_alike(one: Comparison, other: Comparison) -> bool:
    """Whether two runs of a side are equally far from the first run, in every place."""
    return one.gaps == other.gaps and one.steps == other.steps


def _by_data(side: Side, found: Comparison) -> Iterator[str]:
    data = found.data
    first = found.gaps[0] if found.gaps else None
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
    elif first is not None and first.step == 0:
        yield f"the models are others before the first step: {first.name} is"


def worse(one: Verdict, other: Verdict) -> Verdict:
    """The worse of two verdicts."""
    return max(one, other, key=RANKING.index)


def meets(judged: Judged, wanted: Verdict) -> bool:
    """Whether a verdict is at least the one that is wanted."""
    return RANKING.index(judged.verdict) <= RANKING.index(wanted)
