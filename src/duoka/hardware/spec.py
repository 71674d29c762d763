"""Parse `--devices` to a `Request`.

auto        all GPUs; without any, one CPU worker
2           a count: of GPUs if there are any, else of CPU workers
0,3   0-3   GPUs by number, as the driver's program numbers them; also 0-1,4, and `1,` for GPU 1 alone
gpu         all GPUs; also gpu:1, gpu:0,3, gpu:0-3; with a word of torch in place of gpu, those of this type
GPU-3c1a…   a GPU by its UUID, or the beginning of it; several with commas
MIG-3c1a…   one part of a GPU that is split, in the same way
free:2      two GPUs on which nobody else computes; free:2,mem>=10G: with so much free memory
best:1      the GPU with the least work and the most free memory; also with mem>=
cpu         one CPU worker; cpu:4 is four of them
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from duoka.errors import OptionError
from duoka.hardware.vendors import TYPES

Pick = Literal["free", "best"]

MOST_WORKERS = 1024
FORMS = (
    "auto, cpu, cpu:4, a count like 2, GPU numbers like 0,3 or 0-3, gpu, gpu:1, a UUID like GPU-3c1a6d0e or "
    f"MIG-5a2f, free:2, free:2,mem>=10G, best:1, or {', '.join(TYPES)} in place of gpu"
)
ONE_PART = "a part of a GPU (MIG) works alone: a process sees only one, and no collective joins several"
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class Request:
    """The requested devices: a count, numbers or UUIDs of one type, or all of it."""

    type: str  # auto: GPUs if there are any, else the CPU; gpu: GPUs; else cpu, or the word of torch for GPUs
    count: int | None = None  # number of devices; None with numbers, UUIDs or all; always set for the CPU
    indices: tuple[int, ...] = ()  # physical numbers in the order requested
    uuids: tuple[str, ...] = ()  # or their beginnings
    pick: Pick | None = None  # rule by which `count` GPUs are picked; None takes the first
    memory: int = 0  # bytes that must be free on each
    text: str = field(default="", compare=False)  # what the user wrote, for messages

    def __str__(self) -> str:
        return self.text


def parse(text: str) -> Request:
    """Parse `--devices`.

    Raises OptionError if the text is not in the grammar, or asks for no worker, too many, or one device twice.
    """
    try:
        return replace(_parse(re.sub(r"\s*([,:-])\s*", r"\1", text.strip().lower())), text=text.strip())
    except ValueError as error:
        raise OptionError("--devices", text, FORMS, str(error)) from None


def _parse(word: str) -> Request:
    """Parse a text without spaces. This and the following functions raise ValueError, with a hint or without one."""
    if word.startswith(("gpu-", "mig-")):
        return Request("gpu", uuids=_uuids(word))
    if advice := _advice(word):
        raise ValueError(advice)
    kind, colon, rest = word.partition(":")
    if kind in ("free", "best"):
        return _picked(kind, rest)  # type: ignore[arg-type]  # narrowed by the test
    if kind in ("auto", "gpu", *TYPES) and not colon:
        return Request(kind)
    if kind == "cpu":
        return Request("cpu", count=_count(rest) if colon else 1)
    if kind in ("gpu", *TYPES):
        return Request(kind, indices=_numbers(rest))
    if re.fullmatch(r"[0-9]+", word):
        return Request("auto", count=_count(word, "; for GPU 0 alone write `0,` or `gpu:0`"))
    if not colon and re.fullmatch(r"[0-9,-]+", word):
        return Request("gpu", indices=_numbers(word))
    raise ValueError


def _picked(pick: Pick, rest: str) -> Request:
    """Parse `2`, or `2,mem>=10G`, after `free:` or `best:`."""
    count, *conditions = rest.split(",")
    if re.fullmatch(r"[0-9]+", count) is None:
        raise ValueError(f"write how many, for example {pick}:1")
    memory = 0
    for condition in conditions:
        match = re.fullmatch(r"mem ?>= ?([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", condition)
        if match is None:
            quoted = "; a shell takes `>` for itself: quote it" if condition == "mem" else ""
            raise ValueError(f"the one condition is free memory: '{pick}:{count},mem>=10G'{quoted}")
        memory = max(memory, int(float(match[1]) * UNITS[match[2]]))
    return Request("gpu", count=_count(count), pick=pick, memory=memory)


def _uuids(word: str) -> tuple[str, ...]:
    """Parse `GPU-3c1a6d0e,GPU-8932f937` or `MIG-5a2f0b1c` to UUIDs in the driver's spelling."""
    items = word.split(",")
    for item in items:
        if re.fullmatch(r"(gpu-|mig-|mig-gpu-)[0-9a-f][0-9a-f/-]*", item) is None:
            raise ValueError(f"{item!r} is not the beginning of a UUID; numbers and UUIDs do not mix")
    if len(items) > 1 and "mig-" in word:
        raise ValueError(ONE_PART)
    uuids = tuple(re.sub("gpu-|mig-", lambda kind: kind[0].upper(), item) for item in items)
    if len(set(uuids)) < len(uuids):
        raise ValueError("a UUID is given twice, and a device has one worker")
    return uuids


def _count(digits: str, hint: str = "") -> int:
    if re.fullmatch(r"[0-9]+", digits) is None:
        raise ValueError("a number of workers is expected after `cpu:`")
    if not digits.strip("0"):
        raise ValueError(f"that is no worker{hint}")
    if len(digits) > 9 or int(digits) > MOST_WORKERS:
        raise ValueError(f"that is more than {MOST_WORKERS} workers")
    return int(digits)


def _numbers(listed: str) -> tuple[int, ...]:
    """Parse `0,3`, `0-3`, `0-1,4` or `1,`."""
    items = listed.removesuffix(",").split(",")
    numbers = [number for item in items for number in _item(item)]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is given twice, and a device has one worker")
    return tuple(numbers)


def _item(item: str) -> range:
    if re.fullmatch(r"-[0-9]+", item):
        raise ValueError("device numbers are not negative; for all GPUs write `gpu`")
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
    if match is None:
        raise ValueError(f"{item!r} is not a number or a range of numbers" if item else "a number is missing")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"the range {item} runs backwards; write {last}-{first}")
    if last >= MOST_WORKERS:
        raise ValueError(f"device numbers end at {MOST_WORKERS - 1}")
    return range(first, last + 1)


def _advice(word: str) -> str:
    first, colon, _ = word.partition(":")
    if re.fullmatch(r"([a-z]+:)?[0-9]+:[0-9]+", word):
        return "name a part of a GPU (MIG) by its UUID, which `duoka gpus` shows"
    if word in ("free", "best"):
        return f"write how many, for example {word}:1"
    if first == "gpus":
        return f"write {word.replace('gpus', 'gpu', 1)}"
    if colon and f",{first}:" in word:
        return f"write {word.replace(f',{first}:', ',')}"
    return ""
