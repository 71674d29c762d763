"""`duoka doctor`: check whether this machine will train well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial

import click

from duoka.doctor import Finding, examine

HELP = """\
Check versions, GPUs and their links, the speed between devices, limits, host names and clocks, free disk. For each
problem print why it matters and what to do. Exit code 1 if something will not work.
"""


def doctor(as_json: bool) -> Callable[[], int]:
    """Return the function that runs the checks; it runs outside of click."""
    return partial(_show, as_json)


def _show(as_json: bool) -> int:
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if not as_json:  # as they come: importing torch and the all-reduce take seconds
            click.echo("\n".join(lines(finding)))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(summary(findings))
    return int(any(finding.level == "fault" for finding in findings))


def lines(finding: Finding) -> list[str]:
    """Format a finding: one line if ok, else three."""
    head = f"{finding.level:<8}{finding.subject:<20}{finding.what}"
    if finding.level == "ok":
        return [head]
    return [head, f"{'':<28}why: {finding.why}", f"{'':<28}do:  {finding.todo}"]


def summary(findings: Iterable[Finding]) -> str:
    """Count the faults and pieces of advice."""
    levels = [finding.level for finding in findings]
    faults, advice = levels.count("fault"), levels.count("advice")
    return f"{faults or 'no'} fault{'s' * (faults != 1)}, {advice or 'no'} piece{'s' * (advice != 1)} of advice"


command = click.Command(
    "doctor", callback=doctor, help=HELP, params=[click.Option(["--json", "as_json"], is_flag=True, help="As data.")]
)
