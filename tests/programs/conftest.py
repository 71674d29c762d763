from __future__ import annotations

from pathlib import Path

import pytest

ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder in which pytorch's examples, nanoGPT and minGPT lie; an empty one where none is given."""
    return Path(request.config.getoption("--programs") or tmp_path).resolve()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be shown when all tests are over."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("programs: seconds under python and on 2 workers, largest differences")
        terminalreporter.write_line("\n".join(rows))
