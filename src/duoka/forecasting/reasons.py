"""Why a step on more devices does not take its part of the time: of what was measured, what counts."""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecasting.forecast import Forecast, Side

GOOD = 0.7  # of the ideal: below, it is said why
WORTH_A_WORD = 0.2  # of the time that is lost against the ideal


def is_short(forecast: Forecast, side: Side) -> bool:
    """Whether a number of devices stays behind what one expects of it."""
    return side.devices > 1 and (side.devices > forecast.best.devices or forecast.part(side) < GOOD)


def reasons(forecast: Forecast, side: Side) -> list[str]:
    """Sentences for a person, what weighs most first; none where nothing that was measured explains it."""
    timing, one, step = side.timing, forecast.one.timing, in_words(side.timing.step)
    lost = timing.step - one.step / side.devices
    found: list[tuple[float, str]] = []
    if side.waited is not None:
        found.append((side.waited, f"{in_words(side.waited)} of the {step} of a step are waiting for other ranks"))
    found.append(
        (
            timing.whole,
            f"{in_words(timing.whole)} of the {step} of a step go into what every rank computes whole, most of it "
            f"{timing.costliest}",
        )
    )
    told = [text for seconds, text in sorted(found, reverse=True) if seconds > 0 and seconds >= WORTH_A_WORD * lost]
    return [*_known(forecast, side), *told, *_rest(side, lost)]


def _known(forecast: Forecast, side: Side) -> Iterator[str]:
    """What follows from numbers, whatever the time."""
    samples, devices = side.timing.samples, side.devices
    if samples is not None and samples < devices:
        yield f"a batch of {samples} over {devices} devices is computed whole by each of them"
    if side.plan.devices[0].type == "cpu":
        cores = forecast.asked.cores
        together, alone = min(devices * side.timing.threads, cores), min(forecast.one.timing.threads, cores)
        if together < devices * alone:
            yield f"{devices} CPU workers have {_cores(together)} together, and one by itself has {alone}"


def _rest(side: Side, lost: float) -> Iterator[str]:
    """What is neither a share of one device's step nor one of the above."""
    if side.waited is None:
        return
    rest = lost - side.waited - side.timing.whole
    if rest >= WORTH_A_WORD * lost:
        yield (
            f"{in_words(rest)} more than its share of one device's step is what each rank does by itself: the "
            "script's own lines, the optimizer's step, and what sharing out costs"
        )


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number > 1)}"


def in_words(seconds: float) -> str:
    """`12.3 ms`, `1.2 s`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.0f} µs"
