from __future__ import annotations

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
