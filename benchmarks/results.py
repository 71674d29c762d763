"""benchmarks/results/<machine>.json: what was measured on one machine, by benchmark.

A benchmark that is measured again takes the place of what it was; a ratio is always of one run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS, machine
from benchmarks.machine import Machine
from benchmarks.runs import Samples
from benchmarks.table import Finding, Row

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Measured:
    """What one benchmark found. day: ISO 8601. seconds: how long it took."""

    day: str
    seconds: float
    versions: Mapping[str, str]
    found: Sequence[Row | Finding]

    @classmethod
    def now(cls, seconds: float, found: Sequence[Row | Finding]) -> Measured:
        return cls(date.today().isoformat(), round(seconds, 1), machine.versions(), found)


@dataclass(frozen=True)
class Results:
    """All that was measured on one machine."""

    machine: Machine
    benchmarks: Mapping[str, Measured]

    def row(self, what: str) -> Row | None:
        """The comparison of that name; None where it was not measured here."""
        rows = (it for one in self.benchmarks.values() for it in one.found if isinstance(it, Row))
        return next((row for row in rows if row.what == what), None)


def read(path: Path) -> Results:
    stored = json.loads(path.read_text())
    host = Machine(**stored["machine"] | {"gpus": tuple(stored["machine"]["gpus"])})
    return Results(host, {name: _measured(one) for name, one in stored["benchmarks"].items()})


def read_all() -> list[Results]:
    """Of all machines; those without a GPU come first."""
    return sorted(map(read, FOLDER.glob("*.json")), key=lambda one: (len(one.machine.gpus), one.machine.name))


def write(new: Mapping[str, Measured]) -> Path:
    """Put what was just measured into this machine's file."""
    host = machine.this()
    path = FOLDER / f"{host.name}.json"
    before = json.loads(path.read_text())["benchmarks"] if path.exists() else {}
    found = before | {name: _plain(one) for name, one in new.items()}
    stored = {"machine": asdict(host), "benchmarks": {name: found[name] for name in BENCHMARKS if name in found}}
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return path


def _plain(one: Measured) -> dict[str, Any]:
    rows = [it for it in one.found if isinstance(it, Row)]
    return {
        "day": one.day,
        "seconds": one.seconds,
        "versions": dict(one.versions),
        "rows": [
            {
                "what": row.what,
                "unit": row.this.unit,
                "ratio": round(row.ratio, 3),
                "bar": row.bar,
                "this": [float(f"{value:.4g}") for value in row.this.values],
                "against": [float(f"{value:.4g}") for value in row.against.values],
            }
            for row in rows
        ],
        "findings": [asdict(it) for it in one.found if isinstance(it, Finding)],
    }


def _measured(stored: dict[str, Any]) -> Measured:
    rows = [
        Row(row["what"], *(Samples(tuple(row[side]), row["unit"]) for side in ("this", "against")), row["bar"])
        for row in stored["rows"]
    ]
    findings = [Finding(**finding) for finding in stored["findings"]]
    return Measured(stored["day"], stored["seconds"], stored["versions"], [*rows, *findings])
