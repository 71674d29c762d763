from __future__ import annotations

from tests.flows.flow import Flow
from tests.plain.said import as_python, said


def test_a_set_of_parameters_has_one_order(flow: Flow) -> None:
    source = """
        import os, torch

        elsewhere = [torch.empty(1) for _ in range(os.getpid() % 97)]  # addresses differ
        parameters = []
        for number in range(60):
            parameters.append(torch.nn.Parameter(torch.full((2,), float(number))))
            elsewhere = elsewhere[os.getpid() % 2:]
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in set(parameters)]
        for x in torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2):
            (x * sum(parameter * parameter for parameter in {*parameters})).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        print([int(parameter[0]) for parameter in set(parameters)])
        """
    first, other = said(flow, source)
    assert first == other


def test_tensors_stay_in_sets_and_dictionaries(flow: Flow) -> None:
    source = """
        import atexit, gc, os, torch
        from torch.utils.data import DataLoader

        net = torch.nn.Linear(3, 3)
        names = {parameter: name for name, parameter in net.named_parameters()}
        groups = {parameter: 0 for parameter in net.parameters()}
        net.weight.no_decay = True
        for x in DataLoader(torch.ones(4, 3), batch_size=2):
            groups[x] = net(x).sum()
            kept = {x, *net.parameters()}
        print(names[net.weight], net.weight in kept, net.weight.no_decay, x in groups, len(groups), len(kept))
        del groups, kept, x
        gc.collect()
        more = {torch.ones(1) for _ in range(1000)}
        print(len(more), all(one in more for one in list(more)))
        atexit.register(lambda: print(names[net.bias]))

        class Rows:
            def __len__(self): return 4
            def __getitem__(self, i): return names[net.weight]

        print(list(DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")))
        """
    as_python(flow, source)
    as_python(flow, source, "--strategy", "fsdp")
