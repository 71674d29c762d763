"""Format an inventory as the text of `duoka gpus`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from duoka.hardware.choice import user_of
from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.inventory import Inventory
from duoka.hardware.machine import Machine

GIB = 1 << 30
HEAD = ("GPU", "name", "UUID", "memory GiB", "util", "temp", "power W", "who")
LONGEST_COMMAND = 60  # characters of a command in a line of the table


def lines(inventory: Inventory, machine: Machine, processes: bool = False) -> list[str]:
    """Return one line for each GPU, and with `processes` one for each process; without a GPU, the CPU.

    A split GPU (MIG) has a line for each part, numbered 0:1.
    """
    cards = (*inventory.gpus, *inventory.others)
    if not cards:
        return [f"{machine.host}: no GPU ({inventory.no_gpus})", _processor(machine)]
    versions = [f"{what} {version}" for what, version in inventory.versions.items() if version]
    rows: list[tuple[str, ...] | str] = [HEAD]
    for card in cards:
        rows += _card(card, processes)
    return [f"{machine.host}: {', '.join(versions) or inventory.vendor}", *_aligned(rows)]


def as_json(inventory: Inventory, machine: Machine) -> dict[str, Any]:
    """Return the inventory as plain data: bytes, percent, °C and watts; None if unknown."""
    return {"machine": asdict(machine), **asdict(inventory)}


def _card(card: Gpu, processes: bool) -> Iterator[tuple[str, ...] | str]:
    yield _row(card, processes)
    if processes and not card.is_split:
        yield from (f"      {_process(process, in_full=True)}" for process in _ordered(card.processes or ()))
    for part in card.parts:
        yield from _card(part, processes)


def _row(card: Gpu, processes: bool) -> tuple[str, ...]:
    power = f"{_figure(card.power)}/{_figure(card.power_limit)}"
    return (
        card.number,
        card.name,
        card.uuid[:12] or "-",
        f"{_gib(card.used)}/{_gib(card.memory or None)}",
        _figure(card.utilisation, "%"),
        _figure(card.temperature, "C"),
        "-" if power == "-/-" else power,
        _who(card, processes),
    )


def _who(card: Gpu, processes: bool) -> str:
    if card.problem:
        return f"not usable: {card.problem}"
    if card.is_split:
        return f"split into {len(card.parts)} parts (MIG)"
    words = []
    if card.holder is not None:
        words.append(f"{card.holder.command} (pid {card.holder.pid}{_since(card.holder.since)})")
    if card.processes is None:
        words.append("the driver does not report who uses it")
    elif not processes:
        words += [_process(process) for process in _ordered(card.processes)]
    return "; ".join(words) or ("" if card.processes else user_of(card) or "free")


def _process(process: GpuProcess, in_full: bool = False) -> str:
    command = process.command or "(not visible from here)"
    if not in_full and len(command) > LONGEST_COMMAND:
        command = command[: LONGEST_COMMAND - 1] + "…"
    memory = "" if process.memory is None else f", {process.memory / GIB:.1f} GiB"
    kind = ", graphics" if process.kind == "graphics" else ""
    run = f", {process.run}" if process.run else ""
    return f"{process.user or '?'}: {command} (pid {process.pid}{memory}{kind}{run}{_since(process.since)})"


def _since(seconds: float | None) -> str:
    """Return `, since 14:05`, or with the date if that was another day."""
    if not seconds:
        return ""
    then = time.localtime(seconds)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime(", since %H:%M" if is_today else ", since %Y-%m-%d %H:%M", then)


def _ordered(processes: Iterable[GpuProcess]) -> list[GpuProcess]:
    return sorted(processes, key=lambda process: (process.kind, -(process.memory or 0), process.pid))


def _processor(machine: Machine) -> str:
    load = " ".join(f"{figure:.2f}" for figure in machine.load)
    memory = f"{machine.used / GIB:.1f}/{machine.memory / GIB:.1f} GiB"
    cores = f"{machine.cores} core{'s' * (machine.cores > 1)}"
    return f"CPU  {machine.processor}  {cores}  load {load}  memory {memory}"


def _aligned(rows: Sequence[tuple[str, ...] | str]) -> list[str]:
    """Pad columns to equal width; a row that is a string stays as it is."""
    columns = zip(*(row for row in rows if not isinstance(row, str)), strict=True)
    widths = [max(map(len, column)) for column in columns]

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return [row if isinstance(row, str) else line(row) for row in rows]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _figure(figure: float | None, unit: str = "") -> str:
    return "-" if figure is None else f"{figure:.0f}{unit}"
