from __future__ import annotations

from pathlib import Path

import pytest

ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder in which the repositories lie; an empty one where none is given."""
    return Path(request.config.getoption("--programs") or tmp_path).resolve()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> list[int]:
    """On how many the programs run, one after the other: `--workers 1,2,3`."""
    return [int(count) for count in request.config.getoption("--workers").split(",")]


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be shown when all tests are over."""
    return request.config.stash.setdefault(ROWS, [])


HEAD = """\
| program | field | workers | numbers | python s | duoka s | printed | saved | whole |
|---|---|---|---|---|---|---|---|---|"""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("programs: largest differences from python, of what is allowed")
        terminalreporter.write_line("\n".join((HEAD, *sorted(rows))))
