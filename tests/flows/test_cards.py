"""What scripts do on cards and not on CPUs, on two simulated ones."""

from __future__ import annotations

import pytest

from tests.flows.flow import Flow

pytestmark = pytest.mark.cards

TRAINING = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    {place}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=6, shuffle=True):
        {move}
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{{loss.item():.5f}}")
    {end}
"""


def training(place: str, move: str, end: str = "") -> str:
    return TRAINING.format(place=place, move=move, end=end)


NUMBERED = {
    "string": ('model.to("cuda:1")', 'x, y = x.to("cuda:1"), y.to(device="cuda:1")'),
    "device": (
        'device = torch.device("cuda", 1); model.to(device); noise = torch.zeros(1, device=device)',
        "x, y = x.to(device) + noise, y.to(device)",
    ),
    "number": ("model.cuda(1)", "x, y = x.cuda(1, non_blocking=True), y.cuda(device=1)"),
    "current": ("torch.cuda.set_device(1); model.cuda()", "x, y = x.cuda(), y.cuda()"),
    "context": (
        "model.to('cuda:1'); torch.cuda.synchronize(1); print(torch.cuda.memory_allocated(1) > 0)",
        "\n        with torch.cuda.device(1): x, y = x.cuda(), y.cuda()",
    ),
    "parallel": (
        "model = nn.DataParallel(model.cuda(1), device_ids=[1, 0], output_device=1)",
        "x, y = x.cuda(), y.cuda(1)",
    ),
    "both": (
        'model[0].to("cuda:0"); model[2].to("cuda:1");'
        'model[2].register_forward_pre_hook(lambda m, a: a[0].to("cuda:1"))',
        'x, y = x.to("cuda:0"), y.to("cuda:1")',
    ),
    "file": (
        'torch.save(model.to("cuda:1").state_dict(), f := f"weights{torch.initial_seed()}.pt");'
        'model.load_state_dict(torch.load(f)); model.load_state_dict(torch.load(f, map_location="cuda:1"))',
        "x, y = x.to('cuda:1'), y.to('cuda:1')",
    ),
}


@pytest.mark.parametrize("how", NUMBERED)
def test_numbers_of_cards_in_a_script(flow: Flow, how: str) -> None:
    script = flow.write("train.py", training(*NUMBERED[how]))
    expected = flow.python([flow.write("one.py", training("model.cuda()", "x, y = x.cuda(), y.cuda()"))]).ok().stdout
    found = flow.run(["run", "--devices", "0,1", script]).ok()
    assert found.stdout.replace("True\n", "") == expected
    if how not in ("both", "parallel"):  # python needs no second card
        assert flow.python([script]).ok().stdout.replace("True\n", "") == expected
    assert "cuda:1" in found.stderr


ASKED = {
    "cuda": "torch.cuda.is_available()",
    "accelerator": "torch.accelerator.is_available()",
    "count": "torch.cuda.device_count()",
}


@pytest.mark.parametrize("asked", ASKED)
def test_launch_after_the_program_has_looked_for_cards(flow: Flow, asked: str) -> None:
    source = f"""
        import torch, duoka
        assert {ASKED[asked]}

        def train():
            run = duoka.start(seed=0)
            return run.rank, str(run.device), torch.ones(2, device=run.device).sum().item()

        print(duoka.launch(train, devices=2))
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == "[(0, 'cuda:0', 2.0), (1, 'cuda:0', 2.0)]\n"


@pytest.mark.parametrize("use", ["torch.ones(1, device='cuda')", "torch._C._cuda_getDeviceCount()"])
def test_launch_after_the_program_has_used_cuda(flow: Flow, use: str) -> None:
    source = f"""
        import sys, torch, duoka
        from dataclasses import dataclass
        {use}
        scale = 3.0

        class Wrong(ValueError):
            pass

        @dataclass
        class Result:
            rank: int
            value: float

        def train(fails):
            run = duoka.start(seed=0)
            if fails and run.rank == 1:
                raise Wrong("so it is")
            return Result(run.rank, (scale * torch.ones(2, device=run.device)).sum().item())

        print(*duoka.launch(train, False, devices=2))
        try:
            duoka.launch(train, True, devices=2)
        except Wrong as error:
            print("Wrong", error, "rank 1: Traceback" in str(error.__cause__))
        sys.modules["cloudpickle"] = None
        duoka.launch(train, False, devices=2)
    """
    result = flow.python([flow.write("train.py", source)])
    assert result.stdout == "Result(rank=0, value=6.0) Result(rank=1, value=6.0)\nWrong so it is True\n"
    assert "duoka.launch: this process has used CUDA already" in result.stderr
    assert "pip install cloudpickle" in result.stderr
