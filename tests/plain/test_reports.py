"""Lines at the end of a run: functions computed whole, and refusals that a script caught."""

from __future__ import annotations

import re

import pytest

from tests.flows.flow import Flow
from tests.plain.said import run

HEAD = """
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    (x,) = next(iter(DataLoader(TensorDataset(torch.randn(400, 30)), 400)))
"""
SORTS = """
    for _ in range(20):
        x.sort(0)
    x[0].sum().item()
"""


def _said(flow: Flow, source: str, *options: str) -> str:
    return flow.run(["run", "--devices", "cpu:2", *options, flow.write("script.py", source)]).ok().stderr


@pytest.mark.parametrize("ending", ["", "    sys.exit(0)", "    sys.exit()"])
def test_what_is_computed_whole_is_listed_with_its_share_of_the_time(flow: Flow, ending: str) -> None:
    stderr = _said(flow, HEAD + SORTS + ending, "--verbose")
    pattern = r"computed whole by every rank: (\w+) at script.py:(\d+), (\w+|\d+ times), (\d+\.\d)% of the time"
    found = re.findall(pattern, stderr)
    assert found[0][:3] == ("sort", "10", "20 times")
    assert ("__getitem__", "11", "once") in [entry[:3] for entry in found]
    shares = [float(entry[3]) for entry in found]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100


def test_one_line_where_much_of_the_time_goes_into_it(flow: Flow) -> None:
    stderr = _said(flow, HEAD + SORTS)
    assert len(re.findall(r"\d+% of the time went into operations that every rank computes whole", stderr)) == 1
    assert "most of it into sort at script.py:10; --verbose lists all of them" in stderr


@pytest.mark.parametrize("ending", ["", "    sys.exit(0)"])
@pytest.mark.parametrize("catch", ["except Exception", "except"])
def test_a_refusal_that_the_script_catches_still_ends_the_run_badly(flow: Flow, catch: str, ending: str) -> None:
    source = f"""
    try:
        x.set_(torch.zeros(3))
    {catch}:
        print("caught")
    print("goes on")
    {ending.strip()}
"""
    result = run(flow, HEAD + source)
    assert result.stdout.split() == ["caught", "goes", "on"]
    assert result.returncode == 1
    assert "the script caught this, and went on: " in result.stderr
    assert "script.py:10" in result.stderr


def test_a_refused_call_that_the_script_catches(flow: Flow) -> None:
    source = """
    try:
        torch.distributed.init_process_group("gloo")
    except Exception:
        print("caught")
"""
    result = run(flow, HEAD + source, "--kind", "plain")
    assert result.stdout == "caught\n"
    assert result.returncode == 1
    assert "the script caught this, and went on: script.py:10 calls torch.distributed" in result.stderr


def test_a_refusal_inside_of_a_model_that_the_script_catches(flow: Flow) -> None:
    source = """
    from torch import nn

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(30, 2), 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 2:
                x.share_memory_()
            return self.linear(x)

    model = Late()
    for _ in range(4):
        try:
            model(x).sum().item()
        except Exception:
            pass
"""
    result = run(flow, HEAD + source)
    assert result.returncode == 1
    assert "the script caught this, and went on: share_memory_ of a batch cannot be split over ranks" in result.stderr
    assert "script.py:19" in result.stderr
