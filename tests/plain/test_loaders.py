from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said

SOURCE = """
    import os, sys, torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        read = 0

        def __len__(self):
            return 20

        def __getitem__(self, index):
            Samples.read += 1
            return torch.arange(3.0) + index, index

    torch.manual_seed(0)
    loader = DataLoader(Samples(), 5, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            print(len(x), y.tolist(), x.mean().item())
    print(torch.rand(1).item())
"""


def test_batches_are_python_s(flow: Flow) -> None:
    as_python(flow, SOURCE)


def test_each_rank_reads_its_own_rows_or_all(flow: Flow) -> None:
    def read(*options: str) -> list[int]:
        return [int(text.split()[-1]) for text in said(flow, SOURCE + "    print(Samples.read)\n", *options)]

    assert read() == [5 + 7 * 2, 5 + 7 * 3]
    assert read("--loading", "whole") == [40, 40]


def test_a_worker_init_function_of_the_script_s_own(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset, get_worker_info

        def init(worker):
            get_worker_info().dataset.tensors = (torch.arange(8.0) * 10,)

        torch.manual_seed(0)
        for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), 4, num_workers=1, worker_init_fn=init):
            print(x.tolist())
        """
    as_python(flow, source)
