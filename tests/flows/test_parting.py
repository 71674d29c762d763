"""Scripts whose ranks go apart by a value that duoka cannot share: the report names it, and the line that made it."""

from __future__ import annotations

import re

import pytest

from tests.flows.flow import Flow

HEAD = """
import ctypes, os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8)
model = nn.Linear(4, 1)
first = ctypes.CDLL(None).open(b"lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644) >= 0
pid = os.getpid() // 2 * 2 + first  # so that one is odd
"""
PROCESS = """
turn = pid % 2
for (x,) in loader:
    if turn:
        print(x.sum().item())
    else:
        print(x.std().item())
"""
FILE = """
def train(more):
    for (x,) in loader:
        loss = model(x).mean()
        if more:
            loss = loss + x.abs().mean()
        loss.backward()

train(first)
"""
ADDRESS = """
class Trainer:
    def __init__(self):
        self.key = id(self) * 0 + pid  # an address differs as a process's id does
        self.often = self.key % 2 == 0

    def fit(self):
        for (x,) in loader:
            if self.often:
                print(x.mean().item())

Trainer().fit()
"""
ORDER = """
class Task:
    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return pid % 2 ^ (self.name == "sum")  # an address differs as much

tasks = {Task("sum"), Task("mean")}
for (x,) in loader:
    for task in tasks:
        if task.name == "sum":
            print(x.sum().item())
        else:
            print(x.std().item())
"""
EXTENSION = """
drawn = ctypes.create_string_buffer(8)
ctypes.CDLL(None).getrandom(drawn, 8, 0)
bits = f"{int.from_bytes(drawn.raw, 'little'):064b}"
for bit in bits:
    for (x,) in loader:
        if bit == "1":
            print(x.sum().item())
        else:
            print(x.std().item())
"""
LARGE = """
large = nn.Linear(4, 1_200_000)  # gloo sends it
for (x,) in loader:
    if pid % 2:
        large(x).mean().backward()
    else:
        print(x.mean().item())
"""


@pytest.mark.parametrize(
    ("script", "branch", "value"),
    [
        (PROCESS, "if turn:", "pid is "),
        (FILE, "if more:", "more is "),
        (ADDRESS, "if self.often:", "self.often = self.key % 2 == 0"),
        (ORDER, 'if task.name == "sum":', "task.name is "),
        (EXTENSION, 'if bit == "1":', "bits = f"),
        (LARGE, "if pid % 2:", "pid = os.getpid()"),
    ],
    ids=["process", "file", "address", "order", "extension", "large"],
)
def test_the_value_by_which_ranks_went_apart_is_named(flow: Flow, script: str, branch: str, value: str) -> None:
    result = flow.run(["run", "--devices", "cpu:2", flow.write("train.py", HEAD + script)])
    assert result.returncode == 1
    assert "different collectives" in result.stderr or "left in step" in result.stderr
    assert re.search(rf"  they went apart at train.py:\d+: {re.escape(branch)}", result.stderr), result.stderr
    assert " on rank 0, " in result.stderr
    assert value in result.stderr
    assert result.stderr.count("must not decide what a script computes") == 1
