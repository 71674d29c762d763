from __future__ import annotations

from pathlib import Path

import pytest

ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> Path:
    """The folder in which other people's programs lie."""
    folder = request.config.getoption("--programs")
    if folder is None:
        pytest.skip("needs --programs FOLDER, in which pytorch's examples, nanoGPT and minGPT lie")
    return Path(folder).resolve()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be shown when all tests are over."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("programs: seconds under python and on 2 workers, largest differences")
        terminalreporter.write_line("\n".join(rows))
