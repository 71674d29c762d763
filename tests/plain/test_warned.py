from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python

SOURCE = """
import warnings
import torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        warnings.warn("in a backward pass")
        return grad * 2

def epoch(net):
    for (x,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=6):
        nn.MSELoss()(net(x), x.sum(1))
        F.l1_loss(net(x), x.sum(1))
        F.huber_loss(x, net(x))
        F.softmax(x)
        F.kl_div(net(x), x[:, :1])
        torch.tensor(x)
        torch.tensor(x.mean())
        net(x).grad
        (x * (1 + 1j)).float()
        Noisy.apply(net(x)).mean().backward()

torch.manual_seed(0)
"""


def test_warnings_name_the_lines_that_they_name_under_python(flow: Flow) -> None:
    recorded = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    epoch(nn.Linear(4, 1))
for one in caught:
    print(Path(one.filename).name, one.lineno, one.category.__name__, str(one.message).partition("(Triggered")[0])
"""
    as_python(flow, SOURCE + recorded)


def test_each_line_warns_once_and_as_the_script_s_filters_say(flow: Flow) -> None:
    shown = """
warnings.filterwarnings("ignore", "To copy construct")
warnings.filterwarnings("error", "Implicit dimension")
net = nn.Linear(4, 1)
try:
    epoch(net)
except UserWarning as warning:
    print(warning)
warnings.filterwarnings("ignore", "Implicit dimension")
epoch(net)
"""
    script = flow.write("shown.py", SOURCE + shown)
    expected = flow.python([script]).ok()
    found = flow.run(["run", "-q", "--devices", "cpu:2", script]).ok()
    assert found.stdout == expected.stdout
    assert found.stderr == expected.stderr
    assert expected.stderr.count("in a backward pass") == 2  # with its line
