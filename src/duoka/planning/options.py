"""Requested settings, before anything is decided."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from duoka.errors import MISSING, OptionError
from duoka.script import Target

BatchNorm = Literal["whole", "local"]
KindWord = Literal["auto", "plain", "distributed", "api"]
Loading = Literal["auto", "whole", "shared"]
Randomness = Literal["whole", "worker"]
Verbosity = Literal["quiet", "normal", "verbose"]

MOST_THREADS = 4096  # this and the next three: what is more is taken for a slip of the keyboard
MOST_MACHINES = 4096
MOST_RESTARTS = 1000
MOST_SHARES = 4096
SHARES = 8  # of each batch, with the strategy exact
ROWS = ("auto", "even")
LONGEST = 30 * 24 * 3600.0
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # bytes
SIZES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}

_NUMBERS = {
    "--threads": f"a whole number from 1 to {MOST_THREADS}",
    "--restarts": f"a whole number from 0 to {MOST_RESTARTS}",
    "--shares": f"a power of two from 1 to {MOST_SHARES}",
    "--machines": f"a whole number from 1 to {MOST_MACHINES}",
    "--machine": "the number of this machine, 0 for the first",
}


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of one run, of which this is one: a command is started on each.

    An engine may start a command for each rank instead (`each`); then "machine" means rank in these fields. Raises
    OptionError if the count or the number is out of range.
    """

    count: int = 1
    number: int = 0  # of this one, from 0
    host: str = ""  # host and port: where machine 0 listens
    port: int = 0
    engine: str = ""  # the launcher whose variables set all this; empty if the user typed it
    # This and the next two are empty before the machines have connected, and for one.
    workers: tuple[int, ...] = ()  # of each machine
    names: tuple[str, ...] = ()  # the host name of each
    hosts: tuple[str, ...] = ()  # the real machine of each, by a unique name
    each: Literal["machine", "rank"] = "machine"
    local_rank: int = 0  # of a command for a rank: its number among the commands of its real machine
    here: int = 0  # the number of these; 0: unknown
    store: bool = False  # host and port are those of a torch store, in which rank 0 publishes where it listens
    job: str = ""  # a text that names the engine's job and this start of it
    home: bool = False  # its machines share the user's home directory
    how: str = ""  # a command that starts one command on each machine

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_MACHINES:
            raise OptionError("--machines", self.count, _NUMBERS["--machines"])
        if not 0 <= self.number < self.count:
            hint = f"--machines {self.count} are numbered from 0"
            raise OptionError("--machine", self.number, f"from 0 to {self.count - 1}", hint)

    @property
    def rendezvous(self) -> str:
        """The value of `--rendezvous`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def spans(self) -> list[range]:
        """Ranks of each machine's workers, once the machines have connected: numbered machine by machine."""
        ends = accumulate(self.workers)
        return [range(end - count, end) for end, count in zip(ends, self.workers, strict=True)]

    def beside(self, workers: int) -> tuple[int, int, int, int]:
        """Return the place of this command's workers on its real machine, once the machines have connected.

        workers: of this command. Returns the local rank of the first one, the number of workers of the real machine,
        its number, and the number of real machines.
        """
        if self.each == "machine":
            return 0, workers, self.number, self.count
        mine, order = self.hosts[self.number], list(dict.fromkeys(self.hosts))
        local = self.hosts[: self.number].count(mine)
        return local, self.hosts.count(mine), order.index(mine), len(order)

    def ranks(self) -> list[list[int]]:
        """Return the ranks of each real machine, once the machines have connected."""
        if self.each == "machine":
            return [[*span] for span in self.spans]
        hosts = dict.fromkeys(self.hosts)
        return [[rank for rank, host in enumerate(self.hosts) if host == machine] for machine in hosts]

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that has a rank."""
        return next((number for number, span in enumerate(self.spans) if rank in span), self.number)

    def called(self, number: int) -> str:
        """Return `machine 1 (node2)`, or `rank 1 (node2)`."""
        return f"{self.each} {number}" + (f" ({self.names[number]})" if self.names else "")

    def where(self, number: int) -> str:
        """Return `machine 1 (node2)`, or where each is a rank only `node2`."""
        return self.called(number) if self.each == "machine" or not self.names else self.names[number]


ONE_MACHINE = Machines()


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How a script is computed: settings that are the same words on the command line, in a plan and in each rank."""

    batch_norm: BatchNorm = "whole"
    randomness: Randomness = "whole"
    loading: Loading = "auto"
    row_independent: tuple[str, ...] = ()  # functions without a rule that the user says compute each row by itself
    # With fsdp: classes of modules whose parameters are gathered together; empty: found in lists.
    blocks: tuple[str, ...] = ()
    checkpoint_activations: bool = False  # blocks compute their activations again in the backward pass
    cpu_offload: bool = False  # with fsdp: parts of parameters stay in the host's memory


@dataclass(frozen=True)
class Settings(Computing):
    """Settings of a run, as requested and as decided."""

    target: Target
    log_dir: Path | None = None
    timeout: float = 600.0  # seconds that a collective may wait
    step_timeout: float | None = None  # the same after the first step; None: a multiple of the slowest step so far
    restarts: int = 0  # allowed after faults
    verbosity: Verbosity = "normal"
    machines: Machines = ONE_MACHINE
    key_file: Path | None = None  # of the key that the machines share
    report: Path | None = None  # where to write a page about the run


@dataclass(frozen=True, kw_only=True)
class RunSettings(Computing):
    """The settings that change numbers, of a plain script and of the API."""

    strategy: str = "single"
    shares: int = 0  # of each batch, with the strategy exact
    compress: str = "none"  # gradients between ranks, only in the API
    weights: tuple[float, ...] = ()  # of the ranks' shares of a batch; empty: even
    measures_rows: bool = False  # whether the weights follow from each rank's time
    machines: Sequence[Sequence[int]] = ()  # the ranks of each, with the strategy hsdp


@dataclass(frozen=True)
class Options(Settings):
    """Requested settings as typed: `plan.decide` turns them into a `Plan`.

    `devices` and `strategy` have a grammar and a table of their own, and are checked there. Raises OptionError if
    another option has a value that is not allowed.
    """

    devices: str = "auto"
    strategy: str = ""  # "": single for one device, ddp for several
    shares: int | None = None  # of each batch, with the strategy exact; None: the plan decides
    rows: str = ""  # "3:1", "even" or "auto"; "": the plan decides
    kind: KindWord = "auto"
    threads: int | None = None  # per worker; None: the plan decides

    def __post_init__(self) -> None:
        one_of("--kind", self.kind, get_args(KindWord))
        one_of("--batch-norm", self.batch_norm, get_args(BatchNorm))
        one_of("--randomness", self.randomness, get_args(Randomness))
        one_of("--loading", self.loading, get_args(Loading))
        check_names("--row-independent", self.row_independent)
        for name in self.blocks:
            if not name.isidentifier():
                raise OptionError("--blocks", name, "names of the model's classes, like Block,Embedding")
        one_of("verbosity", self.verbosity, get_args(Verbosity))
        if self.shares is not None:
            check_shares(self.shares)
        if self.rows not in ("", *ROWS):
            row_weights(self.rows)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise OptionError("--threads", self.threads, _NUMBERS["--threads"])
        if not 0 <= self.restarts <= MOST_RESTARTS:
            raise OptionError("--restarts", self.restarts, _NUMBERS["--restarts"])
        if not 0 < self.timeout <= LONGEST:  # also true for NaN
            raise OptionError("--timeout", self.timeout, "more than 0 seconds and at most 30 days")
        if self.step_timeout is not None and not 0 < self.step_timeout <= self.timeout:
            raise OptionError("--step-timeout", self.step_timeout, f"auto, or at most --timeout ({self.timeout:g} s)")
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise OptionError("--log-dir", str(self.log_dir), "a directory, or a path where one can be made")
        if self.report is not None:  # checked before the run, as it is written at the end
            if self.report.suffix not in (".html", ".htm") or self.report.is_dir():
                raise OptionError("--report", str(self.report), "the path of a file that ends with .html")
            if not os.access(self.report.parent, os.W_OK):
                raise OptionError("--report", str(self.report), "in a directory that exists and can be written")


def one_of(option: str, value: str, allowed: Iterable[str]) -> None:
    """Check a value against the words that an option allows, and suggest the nearest.

    Raises OptionError if `value` is none of `allowed`.
    """
    words = list(allowed)
    if value not in words:
        close = get_close_matches(str(value).lower(), words, n=1)
        hint = f"did you mean {close[0]}?" if close else ""
        raise OptionError(option, value, f"one of {', '.join(words)}", hint)


def check_names(option: str, names: Iterable[str]) -> None:
    """Check names of functions: `Scan`, `train.Scan`, `mylib::square`.

    Raises OptionError if one of them is no such name.
    """
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(::[^\W\d]\w*|(\.[^\W\d]\w*)*)", str(name)):
            hint = "of an autograd Function, a scripted function or module, or an operator"
            raise OptionError(option, name, "names like Scan, train.Scan or mylib::square", hint)


def check_shares(count: object, option: str = "--shares") -> None:
    """Check a number of shares. Raises OptionError if it is not a power of two, or too large."""
    if not isinstance(count, int) or not 1 <= count <= MOST_SHARES or count & (count - 1):
        hint = "the sums of the shares are added in a binary tree"
        raise OptionError(option, count, _NUMBERS["--shares"], hint)


def row_weights(text: str, option: str = "--rows") -> tuple[float, ...]:
    """Read weights of the devices' shares of a batch: "3:1" is (3.0, 1.0). option: the name used in the message.

    Raises OptionError if they are no numbers above 0.
    """
    try:
        weights = tuple(map(float, text.split(":")))
    except ValueError:
        weights = ()
    if not weights or not all(0 < weight < math.inf for weight in weights):
        hint = "three quarters of each batch for the first of two devices are 3:1"
        raise OptionError(option, text, f"{' or '.join(ROWS)}, or a number above 0 for each device, like 3:1", hint)
    return weights


def shares_of(rows: str | Sequence[float], ranks: int, option: str = "rows") -> tuple[tuple[float, ...], bool]:
    """Return the weights of the ranks' shares, and whether they are to be measured. rows: of `--rows`, or numbers.

    Raises OptionError if there is not one number above 0 for each rank.
    """
    text = rows if isinstance(rows, str) else ":".join(map(str, rows))
    if text in ROWS:
        return (), text == "auto"
    weights = row_weights(text, option)
    if len(weights) != ranks:
        raise OptionError(option, text, f"one number for each of {ranks} devices", "like 3:1 for two")
    return weights, False


def shares_for(ranks: int, asked: int | None, option: str = "--shares") -> int:
    """Return the number of shares into which the strategy exact splits each batch.

    asked: the value of `--shares`, or None for the default. option: the name used in the message. Raises OptionError
    if the number of ranks is larger than `asked`.
    """
    if asked is not None and asked < ranks:
        raise OptionError(option, asked, f"at least the number of devices, {ranks}")
    return asked or max(SHARES, 1 << (ranks - 1).bit_length())  # the next power of two


def which_machines(
    count: str | None,
    number: str | None,
    rendezvous: str | None,
    from_engine: Callable[[int | None], Machines | None],
) -> Machines:
    """Return the machines requested by `--machines`, `--machine` and `--rendezvous`.

    from_engine: returns the machines set by an engine, given `--machines`; called if nothing else was typed. Raises
    OptionError if one of them has a value that is not allowed, or is missing.
    """
    if count is None and (number is not None or rendezvous is not None):
        raise OptionError("--machines", MISSING, "given with --machine and --rendezvous", "it is how many there are")
    if number is None and rendezvous is None:
        typed = None if count is None else whole_number(count, "--machines")
        machines = from_engine(typed)
        if machines is not None and typed in (None, machines.count):
            return machines
        if machines is not None:  # not a choice: the engine has started so many, and each waits for all
            hint = f"--machines 1 makes each a run of its own; without --machines {machines.engine} sets the number"
            raise OptionError("--machines", count, f"{machines.count}, as set by {machines.engine}", hint)
    if count is None:
        return ONE_MACHINE
    many = Machines(whole_number(count, "--machines"))
    if many.count == 1 and rendezvous is None:
        return replace(many, number=whole_number(number or "0", "--machine"))
    if number is None:
        hint = "it is the number of this machine"
        raise OptionError("--machine", MISSING, f"given with --machines, from 0 to {many.count - 1}", hint)
    if rendezvous is None:
        hint = "it is where machine 0 is found, like --rendezvous node1:29500"
        raise OptionError("--rendezvous", MISSING, "given with --machines", hint)
    host, port = _host_and_port(rendezvous)
    return replace(many, number=whole_number(number, "--machine"), host=host, port=port)


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    # An IPv6 address is in brackets, as its colons could be those of the port.
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\s\[\]]+):([0-9]{1,5})", rendezvous.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        hint = "the name or address of machine 0, and a port that is free there"
        raise OptionError("--rendezvous", rendezvous, "HOST:PORT, like node1:29500", hint)
    return match[1].strip("[]"), int(match[2])


def whole_number(text: str, option: str) -> int:
    """Read the value of `--threads`, `--restarts`, `--shares`, `--machines` or `--machine`.

    Raises OptionError if it is not a whole number.
    """
    if re.fullmatch(r"[0-9]{1,9}", text.strip()) is None:  # int() also takes signs, underscores and other digits
        raise OptionError(option, text, _NUMBERS[option])
    return int(text)


def waiting(wait: str | float, option: str = "wait") -> float:
    """Return the seconds to wait, given as a number or as text. option: named in the error.

    Raises OptionError if it is not a duration.
    """
    return seconds(wait, option) if isinstance(wait, str) else float(wait)


def seconds(text: str, option: str = "--timeout") -> float:
    """Return the seconds of a duration: `90`, `90s`, `1.5m`, `10m` or `1h`. option: named in the error.

    Raises OptionError if it is not a duration.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h)?", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else math.nan
    if not 0 < value <= LONGEST:
        raise OptionError(option, text, "more than 0 seconds and at most 30 days, like 90, 90s, 10m or 1h")
    return value


def memory_size(text: str, option: str) -> int:
    """Return the bytes of a size: `80GB`, `16GiB`, `512MB`. Raises OptionError if it is not a size."""
    # With a unit: nobody types the bytes of a GPU, but many "24", and mean GB.
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([MGT]i?B)", text.strip())
    value = float(match[1]) * SIZES[match[2].upper()] if match else 0.0
    if value < 1000:
        raise OptionError(option, text, "a size such as 80GB, 16GiB or 512MB")
    return int(value)
