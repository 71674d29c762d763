"""Runs of plain scripts, and what every rank printed."""

from __future__ import annotations

from itertools import zip_longest

from tests.flows.flow import Flow, Result


def run(flow: Flow, source: str, *options: str, workers: int = 2) -> Result:
    script = flow.write("script.py", source)
    logs = ["--log-dir", str(flow.folder / "logs")]
    return flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", *logs, *options, script])


def said(flow: Flow, source: str, *options: str, workers: int = 2) -> list[str]:
    """Return the output of each rank, of a run that ended well."""
    first = run(flow, source, *options, workers=workers).ok().stdout
    return [first, *((flow.folder / "logs" / f"rank{rank}.log").read_text() for rank in range(1, workers))]


def as_python(flow: Flow, source: str, *options: str, workers: int = 2) -> str:
    """Return the output of `python`, checking that every rank prints the same."""
    expected = flow.python([flow.write("script.py", source)]).ok().stdout
    for found in said(flow, source, *options, workers=workers):
        different = [pair for pair in zip_longest(found.splitlines(), expected.splitlines()) if pair[0] != pair[1]]
        assert not different, f"{len(different)} lines (here, python's): {different}"
    return expected
