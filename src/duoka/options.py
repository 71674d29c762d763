"""What was asked for, before anything is decided."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from duoka.errors import OptionError

BatchNorm = Literal["whole", "local"]
KindWord = Literal["auto", "plain", "distributed", "api"]
Loading = Literal["auto", "whole", "shared"]
Randomness = Literal["whole", "worker"]
Verbosity = Literal["quiet", "normal", "verbose"]

MOST_THREADS = 4096
MOST_RESTARTS = 1000
MOST_SHARES = 4096
SHARES = 8  # of each batch, with the strategy exact
LONGEST = 30 * 24 * 3600.0

_NUMBERS = {
    "--threads": f"a whole number from 1 to {MOST_THREADS}",
    "--restarts": f"a whole number from 0 to {MOST_RESTARTS}",
    "--shares": f"a power of two from 1 to {MOST_SHARES}",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What to run: a script's path, or with `is_module` a module's dotted name."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, as typed: `plan.decide` turns it into a `Plan`.

    `devices` and `strategy` have a grammar and a table of their own, and are checked there.

    shares: of each batch, with the strategy exact; None leaves it to the plan.
    threads: per worker; None leaves it to the plan. timeout: seconds that a collective may wait.
    step_timeout: the same after the first step; None: a multiple of the slowest step so far.
    restarts: how often the workers may be started again after a fault.

    Raises:
        OptionError: an option has a value that it does not take.
    """

    target: Target
    devices: str = "auto"
    strategy: str = "auto"
    shares: int | None = None
    kind: KindWord = "auto"
    batch_norm: BatchNorm = "whole"
    randomness: Randomness = "whole"
    loading: Loading = "auto"
    log_dir: Path | None = None
    threads: int | None = None
    timeout: float = 600.0
    step_timeout: float | None = None
    restarts: int = 0
    verbosity: Verbosity = "normal"

    def __post_init__(self) -> None:
        one_of("--kind", self.kind, get_args(KindWord))
        one_of("--batch-norm", self.batch_norm, get_args(BatchNorm))
        one_of("--randomness", self.randomness, get_args(Randomness))
        one_of("--loading", self.loading, get_args(Loading))
        one_of("verbosity", self.verbosity, get_args(Verbosity))
        if self.shares is not None:
            check_shares(self.shares)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise OptionError("--threads", self.threads, _NUMBERS["--threads"])
        if not 0 <= self.restarts <= MOST_RESTARTS:
            raise OptionError("--restarts", self.restarts, _NUMBERS["--restarts"])
        if not 0 < self.timeout <= LONGEST:
            raise OptionError("--timeout", self.timeout, "more than 0 seconds and at most 30 days")
        if self.step_timeout is not None and not 0 < self.step_timeout <= self.timeout:
            raise OptionError("--step-timeout", self.step_timeout, f"auto, or at most --timeout ({self.timeout:g} s)")
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise OptionError("--log-dir", str(self.log_dir), "a directory, or a path where one can be made")


def one_of(option: str, given: str, allowed: Iterable[str]) -> None:
    """Check a value against the words that an option takes, and suggest the nearest.

    Raises:
        OptionError: `given` is none of `allowed`.
    """
    words = list(allowed)
    if given not in words:
        close = get_close_matches(str(given).lower(), words, n=1)
        hint = f"did you mean {close[0]}?" if close else ""
        raise OptionError(option, given, f"one of {', '.join(words)}", hint)


def check_shares(count: object, option: str = "--shares") -> None:
    """See that batches can be cut into so many shares.

    Raises:
        OptionError: they cannot.
    """
    if not isinstance(count, int) or not 1 <= count <= MOST_SHARES or count & (count - 1):
        hint = "sums are added in pairs, and pairs of pairs"
        raise OptionError(option, count, _NUMBERS["--shares"], hint)


def shares_for(ranks: int, asked: int | None, option: str = "--shares") -> int:
    """Into how many shares the strategy exact cuts each batch.

    Raises:
        OptionError: it cannot be computed by so many ranks.
    """
    if ranks & (ranks - 1):
        hint = "1, 2, 4, 8, ... each add up a whole part of the tree of shares"
        raise OptionError("the number of devices for --strategy exact", ranks, "a power of two", hint)
    if asked is not None and asked < ranks:
        raise OptionError(option, asked, f"at least the number of devices, {ranks}")
    return asked or max(SHARES, ranks)


def whole_number(text: str, option: str) -> int:
    """The number that `--threads`, `--restarts` or `--shares` asks for.

    Raises:
        OptionError: it is not a whole number.
    """
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is None:
        raise OptionError(option, text, _NUMBERS[option])
    return int(text)


def waiting(wait: str | float) -> float:
    """The seconds to wait for devices, as Python is given them: a number, or words as of a duration.

    Raises:
        OptionError: it is not a duration.
    """
    return seconds(wait, "wait") if isinstance(wait, str) else float(wait)


def seconds(text: str, option: str = "--timeout") -> float:
    """The seconds that a duration means: `90`, `90s`, `1.5m`, `10m` or `1h`. `option` is whose it is.

    Raises:
        OptionError: it is not a duration.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else math.nan
    if not 0 < value <= LONGEST:
        raise OptionError(option, text, "more than 0 seconds and at most 30 days, like 90, 90s, 10m or 1h")
    return value
