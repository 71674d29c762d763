from __future__ import annotations

import re
import sys

import pytest
import torch

import duoka
from duoka.errors import VersionError
from duoka.private import NEWEST_TORCH, OLDEST_TORCH, TESTED, numbers, requiring, untested
from tests.flows.flow import ROOT, Flow


def test_what_is_missing_is_named_with_all_versions() -> None:
    versions = f"duoka {duoka.__version__} does not work with torch {torch.__version__}"
    with (
        pytest.raises(VersionError, match=versions.replace("+", r"\+")) as caught,
        requiring("torch", torch.__version__),
    ):
        torch._C._not_there  # type: ignore[attr-defined]  # noqa: B018
    assert "has no attribute '_not_there'" in str(caught.value)
    assert f"install a newer duoka, or a version of torch that it is tested with: {TESTED['torch']}" in str(
        caught.value
    )


def test_what_is_there_is_left_alone() -> None:
    with requiring("torch", torch.__version__):
        assert torch._C is not None


@pytest.mark.parametrize("version", ["2.10.0", "2.15.0+cu132", "2.15.1a0+git1234"])
def test_a_tested_torch_needs_no_word(version: str) -> None:
    assert untested(version) == []


def test_a_newer_torch_is_told_once_and_the_run_goes_on(flow: Flow) -> None:
    api = "import torch; torch.__version__ = '2.99.0'; import duoka; run = duoka.start(); print(run.world_size)"
    result = flow.python([flow.write("script.py", api)]).ok()
    assert result.stdout == "1\n"
    assert result.stderr.count("duoka: torch 2.99.0 is newer than 2.15, the newest that this version of duoka") == 1


def test_this_is_among_the_tested_versions() -> None:
    assert OLDEST_TORCH <= numbers(torch.__version__) <= NEWEST_TORCH
    oldest, newest = TESTED["Python"].split(" to ")
    assert numbers(oldest) <= sys.version_info[:2] <= numbers(newest)


def test_what_is_told_to_be_tested_is_so_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    oldest, newest = TESTED["Python"].split(" to ")
    assert f'requires-python = ">={oldest}"' in project
    assert f'"torch>={".".join(map(str, OLDEST_TORCH))}"' in project
    for minor in range(numbers(oldest)[1], numbers(newest)[1] + 1):
        assert f'"Programming Language :: Python :: 3.{minor}"' in project
    assert f'"Programming Language :: Python :: 3.{numbers(newest)[1] + 1}"' not in project
    for page in ("README.md", "README.zh-CN.md", "docs/versions.md"):
        rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| 2.")]
        assert [numbers(row.split()[1]) for row in rows] == [
            (2, n) for n in range(OLDEST_TORCH[1], NEWEST_TORCH[1] + 1)
        ]
        told = {python for row in rows for python in re.findall(r"\b3\.\d+", row.split("|")[2])}
        assert told == {f"3.{n}" for n in range(numbers(oldest)[1], numbers(newest)[1] + 1)}
    makefile = (ROOT / "Makefile").read_text()
    for torch_ in (OLDEST_TORCH, NEWEST_TORCH):
        assert f"$(MAKE) test TORCH={torch_[0]}.{torch_[1]}.0 " in makefile
    assert f"the oldest and the newest Python of {oldest} to {newest} here" in makefile
