"""The rows of a batch that each device has: weights from `--rows` or the devices, and numbers from weights."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory, units
from duoka.planning.options import row_weights, shares_of

LOADED = 10  # a GPU of whose memory others use more than one part in so many is taken for one that they share


def rows_of(
    asked: str, strategy: str, devices: Sequence[Device], inventory: Inventory, several: bool
) -> tuple[tuple[float, ...], bool, tuple[str, ...]]:
    """Return the weights of the devices' shares of a batch, whether they are measured, and notes for the user.

    asked: the value of `--rows`; "": as "auto" where devices of this machine differ, else even. several: this command
    is one of several, whose devices are not known yet. Raises OptionError if there is not one number for each device.
    """
    if strategy in ("", "single"):
        return (), False, (f"--rows {asked}: one device has all rows",) * bool(asked and strategy)
    if asked in ("", "auto"):
        gpus = {unit.uuid: unit for unit in units(inventory.gpus)}
        used = [gpus[device.uuid] for device in devices if device.uuid in gpus]
        guess = () if several else _guess(used)
        if not asked and (several or not _differ(used)):
            return (), False, ()
        if strategy == "exact":
            return guess, False, ("--rows auto: the first guess, which is not measured with --strategy exact",)
        return guess, True, ()
    if several:  # `joined` knows how many there are
        return () if asked == "even" else row_weights(asked), False, ()
    return *shares_of(asked, len(devices), "--rows"), ()


def _guess(gpus: Sequence[Gpu]) -> tuple[float, ...]:
    """Return weights for GPUs that are not measured yet; empty: even, also if their speed is unknown.

    Each is the smaller of a GPU's parts of all speed and of all free memory, so that what fits in some way is likely
    to fit in this one.
    """
    speeds, free = [gpu.speed for gpu in gpus], [gpu.memory - (gpu.used or 0) for gpu in gpus]
    if not all(speeds) or min(free, default=0) <= 0:
        return ()
    parts = [min(speed / sum(speeds), room / sum(free)) for speed, room in zip(speeds, free, strict=True)]
    return tuple(round(part / min(parts), 2) for part in parts) if len(set(parts)) > 1 else ()


def _differ(gpus: Sequence[Gpu]) -> bool:
    """Return whether GPUs differ in model or memory, or in what other programs use of them."""
    models = {(gpu.name, gpu.capability, gpu.memory >> 30) for gpu in gpus}
    loads = {(gpu.used or 0) * LOADED > gpu.memory for gpu in gpus}
    return len(models) > 1 or len(loads) > 1


def weighted_sizes(n: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rows of each rank, in proportion to its weight: they sum to `n`.

    By the method of largest remainders (Hamilton's): each rank gets its quota rounded down, and those with the
    largest remainders one row more. Every rank gets at least one row if there is one for each, as functions such as
    `amax` have no value for none. A rank with a larger weight than another never gets fewer rows.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [n * weight / sum(exact) for weight in exact]
    sizes = [int(quota) for quota in quotas]
    ranks = range(len(weights))
    by_remainder = sorted(ranks, key=lambda rank: (sizes[rank] - quotas[rank], -weights[rank], -rank))
    for rank in by_remainder[: n - sum(sizes)]:
        sizes[rank] += 1
    if n >= len(weights):
        while (least := min(sizes)) == 0:
            most = max(ranks, key=lambda rank: (sizes[rank], -weights[rank], rank))
            sizes[sizes.index(least)] += 1
            sizes[most] -= 1
    return tuple(sizes)


def ratio(weights: Sequence[float], between: str = ":") -> str:
    """Return weights as `--rows` takes them, such as 3:1 or 1:100000."""
    return between.join(f"{round(weight / min(weights), 2):.9g}" for weight in weights)
