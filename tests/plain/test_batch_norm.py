from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.plain.said import as_python


def test_torchscript_finds_the_names_of_its_caller_and_torch_s_own_functions(flow: Flow) -> None:
    source = """
        import warnings

        import torch
        from torch.nn import functional as F

        warnings.simplefilter("ignore")  # of TorchScript, with Python 3.14

        def main():
            def helper(x: torch.Tensor) -> torch.Tensor:
                return F.l1_loss(x * 3, torch.tensor([1.0, 2.0]))

            @torch.jit.script
            class Box:
                def __init__(self, count: int):
                    self.count = torch.tensor(count)

                def double(self) -> torch.Tensor:
                    return self.count * 2

            @torch.jit.script
            def both(x: torch.Tensor) -> torch.Tensor:
                return F.batch_norm(helper(x) + Box(4).double(), None, None, training=False) if False else helper(x)

            print(both(torch.ones(2)), torch.jit.script(helper)(torch.ones(2)), Box(3).double())

        main()
        print(torch.jit.script(torch.nn.BatchNorm1d(2))(torch.arange(6.0).view(3, 2)))
        """
    as_python(flow, source)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_of_one_value_per_channel_raises_torch_s_error(flow: Flow, workers: int) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader

        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
        for x in DataLoader(torch.randn(9, 1, 3, 3), batch_size=8):
            try:
                net(x)
            except ValueError as error:
                print(error)
        """
    as_python(flow, source, "--strategy", "exact", "--shares", str(workers), workers=workers)
