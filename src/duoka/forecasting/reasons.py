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
    """Sentences for a person, what weighs most first; none where nothing is lost, or nothing that was measured is."""
    lost = side.timing.step - forecast.one.timing.step / side.devices
    if lost <= 0:
        return []
    measured = sorted(_measured(side), reverse=True)
    told = [text for seconds, text in measured if seconds >= WORTH_A_WORD * lost]
    return [*_known(forecast, side), *told, *_rest(side, lost)]


def _measured(side: Side) -> Iterator[tuple[float, str]]:
    """What of a step is not computing one's own share, in seconds and in words."""
    timing, step = side.timing, in_words(side.timing.step)
    if side.waited:
        waiting = f"{in_words(side.waited)} of its {step} are waiting for other ranks"
        yield side.waited, f"{waiting}: the step is too short for the exchange, or they do not come at the same time"
    if timing.whole:
        whole = f"{in_words(timing.whole)} of its {step} go into what every rank computes whole"
        yield timing.whole, f"{whole}, most of it {timing.costliest}"


def _known(forecast: Forecast, side: Side) -> Iterator[str]:
    """What follows from numbers, whatever the time."""
    samples, devices = side.timing.samples, side.devices
    if samples is not None and samples < devices:
        yield f"a batch of {samples} over {devices} devices is computed whole by each of them"
    if side.plan.devices[0].type == "cpu":
        cores = forecast.asked.cores
        together, alone = min(devices * side.timing.threads, cores), min(forecast.one.timing.threads, cores)
        if together < devices * alone:
            yield f"one worker by itself computes on {_cores(alone)} already, and {devices} have {together} together"


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
    """`1.2 s`, `12.3 ms`, `103 µs`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
