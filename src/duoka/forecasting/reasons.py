"""Explain why a step on more devices is slower than the ideal, from the measured costs."""

from __future__ import annotations

from collections.abc import Iterator

from duoka.forecasting.forecast import Forecast, TimedRun
from duoka.system.messages import in_words
from duoka.watching.watcher import UNEVEN, WORTH_A_WORD

GOOD = 0.7  # of the ideal; slower runs are explained


def is_below_ideal(forecast: Forecast, run: TimedRun) -> bool:
    """Return True if this run is far below the ideal, or slower than one with fewer devices."""
    return run.devices > 1 and (run.devices > forecast.best.devices or forecast.efficiency(run) < GOOD)


def reasons(forecast: Forecast, run: TimedRun) -> list[str]:
    """Return sentences for the user, the largest cost first.

    Empty if no time is lost, or if no measured cost explains it.
    """
    lost = run.timing.step - forecast.baseline.timing.step / run.devices
    if lost <= 0:
        return []
    measured = sorted(_measured(run), reverse=True)
    texts = [text for seconds, text in measured if seconds >= WORTH_A_WORD * lost]
    return [*_known(forecast, run), *texts, *_rest(run, lost)]


def _measured(run: TimedRun) -> Iterator[tuple[float, str]]:
    """Yield the costs beside computing one's own share: seconds and a sentence."""
    timing, step = run.timing, in_words(run.timing.step)
    if run.waited:
        waiting = f"{in_words(run.waited)} of its {step} are waiting for other ranks"
        yield run.waited, f"{waiting}: {UNEVEN}"
    if timing.whole:
        whole = f"{in_words(timing.whole)} of its {step} go into operations that every rank computes whole"
        yield timing.whole, f"{whole}, most of it {timing.costliest}"


def _known(forecast: Forecast, run: TimedRun) -> Iterator[str]:
    """Yield causes that follow from counts of samples and cores."""
    samples, devices = run.timing.samples, run.devices
    if samples is not None and samples < devices:
        yield f"a batch of {samples} over {devices} devices is computed whole by each of them"
    if run.plan.devices[0].type == "cpu":
        cores = forecast.request.cores
        together, alone = min(devices * run.timing.threads, cores), min(forecast.baseline.timing.threads, cores)
        if together < devices * alone:
            yield f"one worker by itself computes on {_cores(alone)} already, and {devices} have {together} together"


def _rest(run: TimedRun, lost: float) -> Iterator[str]:
    """Yield a sentence about the part of `lost` that no measurement explains, if it is large enough to mention.

    lost: seconds by which a step exceeds one device's step divided by the number of devices.
    """
    if run.waited is None:
        return
    rest = lost - run.waited - run.timing.whole
    if rest >= WORTH_A_WORD * lost:
        yield (
            f"{in_words(rest)} more than its share of one device's step is work that each rank repeats: the "
            "script's own lines, the optimizer's step, and the cost of sharding"
        )


def _cores(number: int) -> str:
    return f"{number} core{'s' * (number > 1)}"
