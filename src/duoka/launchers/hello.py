"""What a command says first when the machines meet, and whether it belongs to the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from duoka.errors import AskedError
from duoka.options import Machines
from duoka.printable import printable


@dataclass(frozen=True, slots=True)
class Hello:
    """What a command says first.

    name: of its host. machines: how many there are. each: for what each command stands, a machine or a rank.
    workers: of its own. run: a name for the run, of which machine 0's counts. host: which real machine it is on.
    device: its own, if it is a rank and others could have the same. facts: what must be the same on all, by the
    words in which it is told, as digests: what differs is never sent.
    """

    name: str
    machines: int
    each: str = "machine"
    workers: int = 1
    run: str = ""
    host: str = ""
    device: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Hello:
        """Read one that has come over a line.

        Raises:
            ValueError: no command of duoka's says this.
        """
        try:
            found = cls(**value)
        except TypeError:
            raise ValueError("not what a command says first") from None
        texts = (found.name, found.each, found.run, found.host, found.device)
        numbers = (found.machines, found.workers)
        facts = found.facts if isinstance(found.facts, dict) else {"": None}
        good = all(isinstance(text, str) and len(text) < 1024 for text in (*texts, *facts, *facts.values()))
        if not good or not all(type(number) is int and 0 < number < 1 << 20 for number in numbers):
            raise ValueError("not what a command says first")
        return cls(printable(found.name, 255), *(getattr(found, name) for name in cls.__slots__[1:]))


class Differs(AskedError):
    """Two machines were not started to do the same. what: of the facts. other: the machine with which one differs."""

    def __init__(self, what: str, other: int, name: str) -> None:
        self.what, self.other, self.name = what, other, name
        super().__init__(f"all machines must do the same: {what} is not the same on {name}")


def refusal_of(number: int, hello: Hello, met: Mapping[int, Hello], machines: Machines) -> AskedError | None:
    """Why a command is none of this run's, although it has the key; None: it is one.

    Args:
        number: what it says of itself.
        hello: what it said first.
        met: what those said who have come before it, machine 0 among them.
        machines: as machine 0 knows them.
    """
    mine, count, each = met[0], machines.count, machines.each
    if hello.machines != count:
        return AskedError(f"--machines is {count} on {each} 0 ({mine.name}), but {hello.machines} on {hello.name}")
    if not 0 < number < count:
        return AskedError(f"there is no {each} {number} of {count}")
    if number in met:
        return AskedError(f"--machine {number} was given on two machines: {met[number].name} and {hello.name}")
    for what in {**mine.facts, **hello.facts}:
        if mine.facts.get(what) != hello.facts.get(what):
            return Differs(what, number, f"{each} 0 ({mine.name}) and {each} {number} ({hello.name})")
    return _not_beside(number, hello, met, machines) if machines.told_by else None


def _not_beside(number: int, hello: Hello, met: Mapping[int, Hello], machines: Machines) -> AskedError | None:
    """Why a command cannot compute beside those that an engine has started: they would use the same devices twice."""
    lines = f"{machines.how} starts one for each machine; --machines 1 makes each a run of its own"
    for other, one in met.items():
        beside = f"process {other} and process {number} of {machines.told_by}"
        if one.each != hello.each:
            each = f"one on {one.name}, but several on {hello.name}"
            return AskedError(
                f"{machines.told_by} must start as many processes on each machine, but has {each}; {lines}"
            )
        if one.host == hello.host and one.each == "machine":
            return AskedError(f"{beside} must be on different machines, but are both on {hello.name}; {lines}")
        if one.host == hello.host and one.device and one.device == hello.device:
            return AskedError(f"{beside} are two ranks with one device ({hello.name}); {lines}")
    return None
