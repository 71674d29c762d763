from __future__ import annotations

import re

from tests.flows.flow import Flow
from tests.plain.said import run


def test_a_process_group_of_the_script_s_own_is_refused_with_the_way_out(flow: Flow) -> None:
    source = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        """
    result = run(flow, source, "--kind", "plain")
    assert result.returncode == 1
    assert re.search(r"script\.py:3 calls torch\.distributed\.init_process_group", result.stderr)
    assert "run it with --kind distributed" in result.stderr
    assert "script.py" in result.stderr


def test_an_edge_of_a_batch_is_refused_and_of_a_weight_not(flow: Flow) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader

        w = torch.ones(2, requires_grad=True)
        for x in DataLoader(torch.ones(6, 2), batch_size=6):
            h = x * w
            print(torch.autograd.grad(h.sum(), torch.autograd.graph.get_gradient_edge(w)))
            torch.autograd.graph.get_gradient_edge(h)
        """
    result = run(flow, source)
    assert result.returncode == 1
    assert "tensor([6., 6.])" in result.stdout
    assert re.search(r"script\.py:9 calls get_gradient_edge of a batch", result.stderr)
