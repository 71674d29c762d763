"""What was asked for, before anything is decided."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from duoka.errors import MISSING, OptionError

BatchNorm = Literal["whole", "local"]
KindWord = Literal["auto", "plain", "distributed", "api"]
Loading = Literal["auto", "whole", "shared"]
Randomness = Literal["whole", "worker"]
Verbosity = Literal["quiet", "normal", "verbose"]

MOST_THREADS = 4096
MOST_MACHINES = 4096
MOST_RESTARTS = 1000
MOST_SHARES = 4096
SHARES = 8  # of each batch, with the strategy exact
LONGEST = 30 * 24 * 3600.0

_NUMBERS = {
    "--threads": f"a whole number from 1 to {MOST_THREADS}",
    "--restarts": f"a whole number from 0 to {MOST_RESTARTS}",
    "--shares": f"a power of two from 1 to {MOST_SHARES}",
    "--machines": f"a whole number from 1 to {MOST_MACHINES}",
    "--machine": "the number of this machine, 0 for the first",
}


@dataclass(frozen=True, slots=True)
class Target:
    """What to run: a script's path, or with `is_module` a module's dotted name."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that compute one run: a command is started on each, and this is one of them.

    An engine may start a command for each rank instead (`each`); what is said of a machine then holds for a rank.

    count: how many. number: of this one, from 0. host, port: where machine 0 is found by the others.
    told_by: the engine that said all this, where nobody typed it.
    workers, names: of each machine; empty until they have met, and where there is only one. hosts: the real machine
        that each is on, by a name that no other has.
    local_rank, here: of a command for a rank: its number among the commands of its real machine; 0: nobody says.
    store: whether at host and port there is a store of torch's, in which rank 0 says where it listens.
    job: what tells the engine's job, and this start of it, from all others. home: whether its machines have the
        user's home directory in common. how: the words that start one command on each machine.

    Raises:
        OptionError: there is no such machine.
    """

    count: int = 1
    number: int = 0
    host: str = ""
    port: int = 0
    told_by: str = ""
    workers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    each: Literal["machine", "rank"] = "machine"
    local_rank: int = 0
    here: int = 0
    store: bool = False
    job: str = ""
    home: bool = False
    how: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_MACHINES:
            raise OptionError("--machines", self.count, _NUMBERS["--machines"])
        if not 0 <= self.number < self.count:
            hint = f"--machines {self.count} are numbered from 0"
            raise OptionError("--machine", self.number, f"from 0 to {self.count - 1}", hint)

    @property
    def place(self) -> str:
        """Where they meet, as it is typed."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def first_rank(self) -> int:
        """Of this machine's workers: ranks are numbered machine by machine."""
        return sum(self.workers[: self.number])

    def beside(self, workers: int) -> tuple[int, int, int, int]:
        """Once they have met: the local rank of this command's first worker, and how many its real machine has.

        Then the number of the real machine, and how many there are. workers: of this command.
        """
        if self.each == "machine":
            return 0, workers, self.number, self.count
        mine, order = self.hosts[self.number], list(dict.fromkeys(self.hosts))
        local = self.hosts[: self.number].count(mine)
        return local, self.hosts.count(mine), order.index(mine), len(order)

    def of(self, rank: int) -> int:
        """The number of the machine on which a rank is."""
        ends = (sum(self.workers[: number + 1]) for number in range(len(self.workers)))
        return next((number for number, end in enumerate(ends) if rank < end), self.number)

    def called(self, number: int) -> str:
        """`machine 1 (node2)`, or `rank 1 (node2)`."""
        return f"{self.each} {number}" + (f" ({self.names[number]})" if self.names else "")

    def where(self, number: int) -> str:
        """`machine 1 (node2)`, or where each is a rank `node2`: where a rank is that has been named."""
        return self.called(number) if self.each == "machine" or not self.names else self.names[number]


ONE_MACHINE = Machines()


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, as typed: `plan.decide` turns it into a `Plan`.

    `devices` and `strategy` have a grammar and a table of their own, and are checked there.

    shares: of each batch, with the strategy exact; None leaves it to the plan.
    threads: per worker; None leaves it to the plan. timeout: seconds that a collective may wait.
    step_timeout: the same after the first step; None: a multiple of the slowest step so far.
    restarts: how often the workers may be started again after a fault.
    machines: those that compute together. key_file: where their key is.
    row_independent: functions without a rule that compute each row by itself.

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
    machines: Machines = ONE_MACHINE
    key_file: Path | None = None
    row_independent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("--kind", self.kind, get_args(KindWord))
        one_of("--batch-norm", self.batch_norm, get_args(BatchNorm))
        one_of("--randomness", self.randomness, get_args(Randomness))
        one_of("--loading", self.loading, get_args(Loading))
        check_names("--row-independent", self.row_independent)
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


def check_names(option: str, names: Iterable[str]) -> None:
    """Check names of functions: `Scan`, `train.Scan`, `mylib::square`.

    Raises:
        OptionError: one of them is no such name.
    """
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(::[^\W\d]\w*|(\.[^\W\d]\w*)*)", str(name)):
            hint = "the name of a Function, a scripted function or module, or an operator"
            raise OptionError(option, name, "names like Scan, train.Scan or mylib::square", hint)


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


def which_machines(
    count: str | None, number: str | None, meet: str | None, tell: Callable[[int | None], Machines | None]
) -> Machines:
    """What `--machines`, `--machine` and `--meet` ask for.

    tell: given `--machines`, what the engine tells that has started this process; asked where nothing else is typed.

    Raises:
        OptionError: one of them has a value that it does not take, or is missing.
    """
    if count is None and (number is not None or meet is not None):
        raise OptionError("--machines", MISSING, "given with --machine and --meet", "it is how many there are")
    if number is None and meet is None:
        typed = None if count is None else whole_number(count, "--machines")
        told = tell(typed)
        if told is not None and typed in (None, told.count):
            return told
        if told is not None:
            hint = f"--machines 1 makes each a run of its own, and without --machines {told.told_by} is asked"
            raise OptionError("--machines", count, f"{told.count}, as {told.told_by} tells", hint)
    if count is None:
        return ONE_MACHINE
    many = Machines(whole_number(count, "--machines"))
    if many.count == 1 and meet is None:
        return replace(many, number=whole_number(number or "0", "--machine"))
    if number is None:
        hint = "it is the number of this machine"
        raise OptionError("--machine", MISSING, f"given with --machines, from 0 to {many.count - 1}", hint)
    if meet is None:
        hint = "it is where machine 0 is found, like --meet node1:29500"
        raise OptionError("--meet", MISSING, "given with --machines", hint)
    host, port = _host_and_port(meet)
    return replace(many, number=whole_number(number, "--machine"), host=host, port=port)


def _host_and_port(meet: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s\[\]]+):([0-9]{1,5})", meet.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        hint = "the name or address of machine 0, and a port that is free there"
        raise OptionError("--meet", meet, "HOST:PORT, like node1:29500", hint)
    return match[1].strip("[]"), int(match[2])


def whole_number(text: str, option: str) -> int:
    """The number that `--threads`, `--restarts`, `--shares`, `--machines` or `--machine` asks for.

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
