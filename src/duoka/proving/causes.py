"""Find causes of a difference, by running again with one thing changed, or from the recordings.

Each cause is a sentence for the user; causes confirmed by a run come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from duoka.plan import Kind, Plan
from duoka.proving.bounds import Bound, Verdict, judge
from duoka.proving.comparing import Gap, RunComparison
from duoka.proving.runs import ScriptRun

# Options that change numbers: name, the value that does (None: any), the value that does not, and its effect.
OPTIONS: tuple[tuple[str, str | None, Any, str], ...] = (
    ("batch_norm", "local", "whole", "BatchNorm takes the statistics of each share of the batch"),
    ("randomness", "worker", "whole", "each rank draws its own random numbers inside of models"),
    ("loading", "shared", "auto", "random augmentation is seeded by sample, not drawn from the one stream"),
    ("row_independent", None, (), "a function that it names does not compute each row by itself"),
)

Compare = Callable[[ScriptRun], RunComparison]  # runs the script, and compares it with the first run


@dataclass(frozen=True, slots=True)
class RepeatResult:
    """The first run compared with its repetition.

    text: the reason of a difference; empty if the bits are the same.
    """

    verdict: Verdict
    text: str


def of_difference(run: ScriptRun, found: RunComparison, bound: Bound, compare_run: Compare) -> Iterator[str]:
    """Yield explanations of a difference that is larger than rounding; to find them, make further runs.

    Call this only if two runs like the first one differ by no more than rounding.
    """
    tried = list(_by_option(run, bound, compare_run))
    yield from tried
    if tried:
        return
    if run.plan.world_size > 1 and not _alike(found, compare_run(run.repeated())):
        yield f"{run.name} gives other numbers each time it is run: its ranks depend on time or on chance"
    yield from _by_data(run, found)


def amplification(gap: Gap) -> str:
    """Describe how far the script amplifies rounding. gap: of a reference run."""
    return (
        f"rounding is amplified: in a reference run, which differs from the first run in nothing else, {gap.name} is "
        f"{gap.largest:.1e} apart after step {gap.step}, which is {_percent(gap.largest, gap.moved)} of its "
        "change since the start; typical causes are a bias before a normalisation under Adam, a high learning rate, "
        "a chaotic recurrence"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "all"


def of_itself(first: ScriptRun, comparison: RunComparison) -> RepeatResult:
    """Explain why two runs of the same plan differ."""
    text = "" if comparison.same_bits else _repeat_difference(first, comparison)
    return RepeatResult(judge(comparison, Bound([])).verdict, text)


def _repeat_difference(first: ScriptRun, comparison: RunComparison) -> str:
    data, gap, name = comparison.data, _first_gap(comparison), first.name
    if gap is not None and gap.step == 0 and gap.kind != "buffer":
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


def _first_gap(comparison: RunComparison) -> Gap | None:
    """Return the first gap; before step 1 prefer a parameter, which no forward pass has changed."""
    found = comparison.gaps
    return next((gap for gap in found if gap.step == 0 and gap.kind != "buffer"), found[0] if found else None)


def _by_option(run: ScriptRun, bound: Bound, compare_run: Compare) -> Iterator[str]:
    """Yield the option that causes the difference: each alone, and if that does not suffice, all together."""
    in_use = [option for option in OPTIONS if _is_in_use(run.plan, option)]
    if run.plan.kind is Kind.DISTRIBUTED or run.plan.world_size == 1:
        return
    for name, _, neutral, effect in in_use:
        changed: dict[str, Any] = {name: neutral}
        if _verdict(run, changed, bound, compare_run) != "different":
            without = f"with {_flag(name)} {neutral}" if neutral else "without it"
            yield f"{_given(run.plan, name)}: {effect}; {without} only rounding differs"
            return
    if len(in_use) > 1:
        all_changed = {name: neutral for name, _, neutral, _ in in_use}
        if _verdict(run, all_changed, bound, compare_run) != "different":
            flags = [_given(run.plan, name) for name, *_ in in_use]
            yield f"{' and '.join(flags)}, together: without them only rounding differs"


def _verdict(run: ScriptRun, changed: dict[str, Any], bound: Bound, compare_run: Compare) -> Verdict:
    plan: Plan = replace(run.plan, **changed)
    flags = (f"{_flag(name)} {value}" if value else f"without {_flag(name)}" for name, value in changed.items())
    return judge(compare_run(ScriptRun(f"{run.name} {' '.join(flags)}", plan)), bound).verdict


def _is_in_use(plan: Plan, option: tuple[str, str | None, Any, str]) -> bool:
    name, changing, neutral, _ = option
    value = getattr(plan, name)
    return bool(value == changing if changing else value != neutral)


def _given(plan: Plan, name: str) -> str:
    """Return an option as it was typed."""
    value = getattr(plan, name)
    return f"{_flag(name)} {value if isinstance(value, str) else ','.join(value)}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _alike(one: RunComparison, other: RunComparison) -> bool:
    """Return True if two runs differ from the first run by the same amounts."""
    return one.gaps == other.gaps and one.steps == other.steps


def _by_data(run: ScriptRun, found: RunComparison) -> Iterator[str]:
    data = found.data
    first = _first_gap(found)
    if data is not None and (first is None or data.step <= max(first.step, 1)):
        if run.plan.kind is Kind.DISTRIBUTED:
            yield (
                f"the script makes the batches of its ranks itself, and they are not those of one rank: {data.text} "
                f"in step {data.step}"
            )
        elif data.kind == "ranks":
            yield f"{data.text}: what the script trains on depends on the rank or the process"
        else:
            yield f"it is given other data from step {data.step} on: {data.text}"
    elif first is not None and first.step == 0 and first.kind != "buffer":
        yield f"the models are others before the first step: {first.name} is"
