"""The first message of each command of a run on several machines, and the check that they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from duoka.errors import AskedError
from duoka.options import Machines
from duoka.system.messages import printable


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a command.

    name: host name. machines: number of machines. each: what a command runs, the workers of a machine or one rank.
    workers: number of its workers. run: a name for the run; machine 0's is used. host: digest that names the real
    machine. device: digest of its device, if each command is one rank. settings: digests of what must be equal on all
    machines, by name; values themselves are not sent.
    """

    name: str
    machines: int
    each: str = "machine"
    workers: int = 1
    run: str = ""
    host: str = ""
    device: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Hello:
        """Check and convert a received message.

        Raises:
            ValueError: it is not a hello message of duoka.
        """
        try:
            found = cls(**value)
        except TypeError:
            raise ValueError("not the first message of a duoka command") from None
        texts = (found.name, found.each, found.run, found.host, found.device)
        numbers = (found.machines, found.workers)
        settings = found.settings if isinstance(found.settings, dict) else {"": None}
        good = all(isinstance(text, str) and len(text) < 1024 for text in (*texts, *settings, *settings.values()))
        if not good or not all(type(number) is int and 0 < number < 1 << 20 for number in numbers):
            raise ValueError("not the first message of a duoka command")
        return cls(printable(found.name, 255), *(getattr(found, name) for name in cls.__slots__[1:]))


class SettingsDiffer(AskedError):
    """Two machines were started with different settings. what: the setting. other: a machine with another value."""

    def __init__(self, what: str, other: int, name: str) -> None:
        self.what, self.other, self.name = what, other, name
        super().__init__(f"all machines must have the same settings: {what} differs on {name}")


def find_refusal(number: int, hello: Hello, accepted: Mapping[int, Hello], machines: Machines) -> AskedError | None:
    """Return the error for a command that has the key but does not fit the run; None if it fits.

    Args:
        number: machine number of that command.
        hello: its first message.
        accepted: messages of the commands accepted so far, machine 0's among them.
        machines: settings of machine 0.
    """
    mine, count, each = accepted[0], machines.count, machines.each
    if hello.machines != count:
        return AskedError(f"--machines is {count} on {each} 0 ({mine.name}), but {hello.machines} on {hello.name}")
    if not 0 < number < count:
        return AskedError(f"there is no {each} {number} of {count}")
    if number in accepted:
        return AskedError(f"--machine {number} was given on two machines: {accepted[number].name} and {hello.name}")
    for what in {**mine.settings, **hello.settings}:
        if mine.settings.get(what) != hello.settings.get(what):
            return SettingsDiffer(what, number, f"{each} 0 ({mine.name}) and {each} {number} ({hello.name})")
    return _device_conflict(number, hello, accepted, machines) if machines.engine else None


def _device_conflict(
    number: int, hello: Hello, accepted: Mapping[int, Hello], machines: Machines
) -> AskedError | None:
    """Return an error if two commands that an engine started would use the same devices; None otherwise."""
    lines = f"{machines.how} starts one for each machine; --machines 1 makes each a run of its own"
    for other, one in accepted.items():
        beside = f"process {other} and process {number} of {machines.engine}"
        if one.each != hello.each:
            each = f"one on {one.name}, but several on {hello.name}"
            return AskedError(
                f"{machines.engine} must start as many processes on each machine, but has {each}; {lines}"
            )
        if one.host == hello.host and one.each == "machine":
            return AskedError(f"{beside} must be on different machines, but are both on {hello.name}; {lines}")
        if one.host == hello.host and one.device and one.device == hello.device:
            return AskedError(f"{beside} are two ranks with one device ({hello.name}); {lines}")
    return None
