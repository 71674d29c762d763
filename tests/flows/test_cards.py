"""What scripts do on cards and not on CPUs, on two simulated ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.flows.flow import Flow, surroundings

pytestmark = pytest.mark.cards


def on_npu(*names: str) -> list[Any]:
    """These parameters on cards of another vendor."""
    return [pytest.param(name, marks=pytest.mark.npu, id=f"{name}-npu") for name in names]


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


@pytest.mark.parametrize("how", [*NUMBERED, *on_npu("number", "context")])
def test_numbers_of_cards_in_a_script(flow: Flow, how: str) -> None:
    script = flow.write("train.py", training(*NUMBERED[how]))
    expected = flow.python([flow.write("one.py", training("model.cuda()", "x, y = x.cuda(), y.cuda()"))]).ok().stdout
    found = flow.run(["run", "--devices", "0,1", script]).ok()
    assert found.stdout.replace("True\n", "") == expected
    if how not in ("both", "parallel"):  # python needs no second card
        assert flow.python([script]).ok().stdout.replace("True\n", "") == expected
    assert flow.named("cuda:1") in found.stderr


HABITS = {
    "inputs of DataParallel that are on the CPU": ("model = nn.DataParallel(model.cuda())", "y = y.cuda()"),
    "a lazy module": (
        "model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)).cuda(); model(torch.ones(1, 4).cuda())",
        "x, y = x.cuda(), y.cuda()",
    ),
    # Rows that are alone in their share, too: 20 of 6
    "dropout with channels last": (
        "model = nn.Sequential(nn.Linear(4, 36), nn.Unflatten(1, (4, 3, 3)), nn.Conv2d(4, 8, 2), nn.GroupNorm(2, 8),"
        "nn.Dropout2d(0.2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32, 3));"
        "model.to('cuda', memory_format=torch.channels_last);"
        "model[5].register_forward_hook(lambda m, i, o: print(o.is_contiguous(memory_format=torch.channels_last)))",
        "x, y = x.cuda(), y.cuda()",
    ),
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_scripts(flow: Flow, habit: str) -> None:
    script = flow.write("train.py", training(*HABITS[habit]))
    expected = flow.alone(flow.folder).python([script]).ok().stdout
    assert flow.run(["run", "-q", "--devices", "0,1", script]).ok().stdout == expected


SCALED = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=sys.argv[1] == "fused")
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=4)
    for x, y in DataLoader(data, batch_size=4):
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"{loss.item():.1f} {scaler.get_scale()}")
"""


@pytest.mark.parametrize("kind", ["fused", "foreach", *on_npu("fused")])
def test_the_scale_of_offloaded_gradients(flow: Flow, kind: str) -> None:
    """torch copies it to the host without waiting, and reads it there."""
    script = flow.write("train.py", SCALED)
    words: list[str | Path] = ["run", "-q", "--devices", "0,1", "--strategy", "fsdp"]
    here, offloaded = (flow.run([*words, *more, script, kind]).ok().stdout for more in ([], ["--cpu-offload"]))
    assert offloaded == here


ASKED = {
    "cuda": "torch.cuda.is_available()",
    "accelerator": "torch.accelerator.is_available()",
    "count": "torch.cuda.device_count()",
}


@pytest.mark.parametrize("asked", [*ASKED, *on_npu("cuda")])
def test_launch_after_the_program_has_looked_for_cards(flow: Flow, asked: str) -> None:
    source = f"""
        import torch, duoka
        assert {ASKED[asked]}

        def train():
            run = duoka.start(seed=0)
            return run.rank, str(run.device), torch.ones(2, device=run.device).sum().item()

        print(duoka.launch(train, devices=2))
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == flow.named(
        "[(0, 'cuda:0', 2.0), (1, 'cuda:0', 2.0)]\n"
    )


@pytest.mark.parametrize("imports", ["torch, duoka", "torch"])
def test_asking_for_cards_after_duoka_was_imported_leaves_forks_cuda(cards: dict[str, str], imports: str) -> None:
    source = f"""
import {imports}, os
assert torch.cuda.is_available()
if os.fork() == 0:
    os._exit(torch.cuda._is_in_bad_fork())
print(os.wait()[1])
"""
    words = [sys.executable, "-c", source]
    done = subprocess.run(words, env=surroundings(cards), capture_output=True, text=True, check=True)
    assert (done.stdout == "0\n") == ("duoka" in imports)


@pytest.mark.parametrize(
    "use", ["torch.ones(1, device='cuda')", pytest.param("torch._C._cuda_getDeviceCount()", marks=pytest.mark.long)]
)
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
    assert "duoka.launch: this process has used its GPUs already" in result.stderr
    assert "pip install cloudpickle" in result.stderr


def test_a_dataset_of_tensors_on_a_card(flow: Flow) -> None:
    source = """
        import torch, duoka
        from torch.utils.data import StackDataset, TensorDataset
        torch.set_default_device("cuda")
        run = duoka.start(seed=0)
        x = torch.arange(10.0, device=run.device)
        for data in (TensorDataset(x), StackDataset(x=x), (x,), [{"x": value} for value in x]):
            for batch in run.loader(data, batch_size=4):
                value = batch["x"] if isinstance(batch, dict) else batch[0]
                print(value.device.type, value.sum().item())
        print(sum(rows.sum().item() for (rows,) in run.loader((x,), batch_size=4, shuffle=True)))
    """
    expected = flow.named("cuda 6.0\ncuda 22.0\ncuda 17.0\n") * 4 + "45.0\n"
    assert flow.run(["run", "--devices", "0,1", flow.write("train.py", source)]).ok().stdout == expected


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_batches_that_a_loader_pins(flow: Flow, strategy: str) -> None:
    source = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7))
        for collate in (None, lambda samples: {"x": torch.stack([x for x, _ in samples]), "n": torch.tensor([7])}):
            for batch in DataLoader(data, batch_size=3, pin_memory=True, collate_fn=collate):
                leaves = batch.values() if collate else batch
                print([(leaf.is_pinned(), leaf.cuda(non_blocking=True).sum().item()) for leaf in leaves])
    """
    script = flow.write("train.py", source)
    expected = flow.python([script]).ok().stdout
    assert "False" not in expected
    assert flow.run(["run", "--devices", "0,1", "--strategy", strategy, script]).ok().stdout == expected


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_parts_of_a_model_in_streams_of_their_own(flow: Flow, strategy: str) -> None:
    """The layers have several buckets of gradients."""
    source = """
        import torch
        from torch.utils.data import DataLoader
        torch.manual_seed(0)
        left, right = (torch.nn.Linear(8, 900_000).cuda() for _ in range(2))
        head = torch.nn.Linear(1_800_000, 2).cuda()
        parameters = [*left.parameters(), *right.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-6)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        for x in DataLoader(torch.arange(32.0).cos().view(4, 8), batch_size=2):
            x = x.cuda()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                y = right(x).relu()
            x.record_stream(side)
            z = left(x).relu()
            current.wait_stream(side)
            y.record_stream(current)
            loss = head(torch.cat([z, y], 1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.4f}", *(f"{parameter.norm().item():.2f}" for parameter in parameters))
    """
    script = flow.write("train.py", source)
    expected = flow.python([script]).ok().stdout
    assert flow.run(["run", "--devices", "0,1", "--strategy", strategy, script]).ok().stdout == expected


@pytest.mark.cards_and_npu
def test_forecast_of_memory(flow: Flow) -> None:
    asks = training(
        'torch.cuda.set_device(0); model.to("cuda"); noise = torch.zeros(3, device="cuda:0")',
        "x, y = x.cuda(), y.pin_memory().to('cuda', non_blocking=True); torch.cuda.synchronize()",
        "torch.cuda.reset_peak_memory_stats()",
    )
    words = ["forecast", "--memory", "--json", "--devices", "0,1"]
    found, expected = (
        flow.run([*words, flow.write(f"{n}.py", source)]).ok().stdout
        for n, source in (("asks", asks), ("plain", training("noise = torch.zeros(3)", "")))
    )
    assert found.replace("asks.py", "plain.py") == expected
    offloads = {layout["cpu_offload"]: layout for layout in json.loads(found)["layouts"]}
    assert offloads[True]["peak"] < offloads[False]["peak"]
    assert offloads[True]["host"] > offloads[False]["host"] == 0
    assert flow.run(["run", "--strategy", "auto", "--devices", "0,1", flow.folder / "asks.py"]).ok().stdout


SHORT_OF_MEMORY = """
    import torch

    model = torch.nn.Linear(1 << 18, 8, bias=False).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        rows = torch.ones(1 << (3 * step), 1 << 18, device="cuda")
        model(rows).sum().backward()
        optimizer.step()
"""


@pytest.mark.cards_and_npu
@pytest.mark.parametrize("devices", ["0,1", "0,"])
def test_what_a_card_held_when_its_memory_ran_out(flow: Flow, devices: str) -> None:
    """8 MiB of parameters, and what follows from them; 64 rows of 1 MiB do not fit."""
    script = flow.write("train.py", SHORT_OF_MEMORY)
    result = flow.run(["run", "-q", "--devices", devices, script], env={"SIMULATED_MEMORY": "0.0625"})
    assert result.returncode == 1
    held = "which held 8 MiB of parameters, 8 MiB of gradients, 16 MiB of the optimizer's state"
    assert f"memory ran out on this {'rank' if devices == '0,1' else 'device'}, {held}" in result.stderr
    assert ("--strategy fsdp needs less (16 MiB less on each)" in result.stderr) == (devices == "0,1")


@pytest.mark.parametrize("kind", ["plain", "distributed", *on_npu("distributed")])
def test_an_error_of_a_kernel_at_the_end_is_not_lost(flow: Flow, kind: str) -> None:
    source = """
        import os, torch
        x = torch.zeros(3, device="cuda")
        rank = os.environ.get("LOCAL_RANK", os.environ["CUDA_VISIBLE_DEVICES"])  # a plain script has no rank
        x[torch.tensor([7 if rank == "1" else 0], device="cuda")]
    """
    result = flow.run(["run", "--devices", "0,1", "--kind", kind, flow.write("train.py", source)])
    assert result.returncode == 1
    assert "error: device-side assert triggered" in result.stderr
    assert "rank 1" in result.stderr
    assert "`--devices cpu:2` names the line" in result.stderr


GRAPHS = {
    "CUDAGraph": "torch.cuda.CUDAGraph()",
    "graph": "torch.cuda.graph(None)",
    "make_graphed_callables": "torch.cuda.make_graphed_callables(model, (torch.zeros(2, 4),))",
}


@pytest.mark.parametrize("name", [*GRAPHS, *on_npu("graph")])
def test_graphs_are_refused_by_name(flow: Flow, name: str) -> None:
    script = flow.write("train.py", training("model.cuda()\n    " + GRAPHS[name], "x, y = x.cuda(), y.cuda()"))
    result = flow.run(["run", "--devices", "0,1", script])
    assert result.returncode == 1
    assert result.stdout == ""
    assert flow.named(f"train.py:11 calls torch.cuda.{name}") in result.stderr


NORMS = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(21, 3, 6, 6) * 3 + 2, torch.randint(0, 4, (21,)))
    many = [nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)) for _ in range(int(sys.argv[1]))]
    model = nn.Sequential(
        nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 8, 3), *many, nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, track_running_stats=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8),
        nn.Linear(8, 4),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=7):
        x, y = x.to(device).to(memory_format=torch.channels_last), y.to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).logsumexp(1).sum(), x, create_graph=True)
    optimizer.zero_grad()
    slope.square().sum().backward()
    print([f"{p.grad.norm().item():.3f}" for p in model.parameters() if p.dim() > 1 and p.grad is not None])
    with torch.autocast(device, torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    print(f"{loss.item():.1f}")
    for name, value in model.state_dict().items():
        if "running" in name:
            print(name, f"{value.sum().item():.3f}")
    model.double()
    print(f"{F.cross_entropy(model(x.double()), y).item():.4f}")
"""


def test_batch_norm(flow: Flow) -> None:
    script = flow.write("train.py", NORMS)
    expected = flow.python([script, "1"], env={"SIMULATED_CARDS": "", "CUDA_VISIBLE_DEVICES": ""}).ok().stdout
    kernels = []
    for layers in (1, 5):
        counts = flow.folder / f"counts{layers}"
        found = flow.run(["run", "--devices", "0,1", script, str(layers)], env={"SIMULATED_COUNTS": str(counts)}).ok()
        kernels.append(json.loads(Path(f"{counts}.0").read_text().splitlines()[1])["kernels"])
        if layers == 1:
            assert found.stdout == expected
    # Of each layer with its convolution: 14. In steps, without torch's kernels for BatchNorm, there are 41.
    assert (kernels[1] - kernels[0]) / 4 <= 16


OFFLOADED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(10, 64), *blocks, nn.Linear(64, 4))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(TensorDataset(torch.randn(30, 10), torch.randint(0, 4, (30,))), batch_size=6):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
"""


def test_offloaded_parameters_are_copied_while_the_card_computes(flow: Flow) -> None:
    script = flow.write("train.py", OFFLOADED)
    expected = flow.python([script], env={"SIMULATED_CARDS": "", "CUDA_VISIBLE_DEVICES": ""}).ok().stdout
    words = ["run", "--devices", "0,1", "--strategy", "fsdp", "--cpu-offload", script]
    found = flow.run(words, env={"SIMULATED_COUNTS": str(flow.folder / "counts")}).ok()
    assert [float(line) for line in found.stdout.split()] == pytest.approx(
        [float(line) for line in expected.split()], abs=2e-4
    )
    step = json.loads((flow.folder / "counts.0").read_text().splitlines()[2])
    waits = {name: count for name, count in step.items() if name.startswith("sync") or "blocking" in name}
    # The script's own x, y and loss; for each of the 10 blocks an event, after the next one's kernels were started
    assert waits == {"copy.to_card.blocking": 2, "sync.item": 1, "sync.event": 10}
    assert step["copy.to_host"] == 10


CHANGED = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = model[0].weight
    with torch.no_grad():
        for change in (
            {changes}
        ):
            change()
            print([f"{{p.abs().sum().item():.4f}}" for p in model.parameters()])
    {end}
"""
FILLS = """
            lambda: nn.init.normal_(w, std=0.1),
            lambda: w.add_(torch.randn_like(w)),
            lambda: w.copy_(F.dropout(w, 0.5)),
            lambda: w.copy_(torch.bernoulli(w.sigmoid())),
            lambda: w.bernoulli_(0.3),
            lambda: nn.init.orthogonal_(w),
            lambda: w.data.uniform_(1, 2),
            lambda: w.copy_(torch.normal(w, 0.1)),
            lambda: w.copy_(torch.poisson(w)),
            lambda: nn.init.sparse_(w, 0.3),
            lambda: w.view_as(torch.ones(8, 6, device="cuda"))[1].fill_(0.5),
            lambda: nn.init.xavier_uniform_(model[2].weight),
"""
WRITES = """
            lambda: w[0].zero_(),
            lambda: w.data[2].fill_(3),
            lambda: w.view(-1)[:3].fill_(7),
            lambda: w.detach()[3].mul_(2),
            lambda: [row.mul_(1.5) for row in w],
            lambda: w.T[0].fill_(1),
            lambda: w[:, 1].copy_(torch.ones(8, device="cuda")),
            lambda: w.cpu().zero_(),
            lambda: w.detach().cpu().numpy().fill(0),
"""
OF_WEIGHTS = {
    "by the card's generator": (FILLS, 'print(torch.rand(1, device="cuda").item(), torch.rand(1).item())'),
    "through views": (WRITES, "print(w.detach().cpu().clone().numpy().shape, w.cpu().device, w.device, w.type())"),
}


@pytest.mark.cards_and_npu
@pytest.mark.parametrize("offload", [[], ["--cpu-offload"]])
@pytest.mark.parametrize("how", OF_WEIGHTS)
def test_changes_of_sharded_parameters(flow: Flow, how: str, offload: list[str]) -> None:
    changes, end = OF_WEIGHTS[how]
    script = flow.write("train.py", CHANGED.format(changes=changes.strip(), end=end))
    words = ["run", "-q", "--devices", "0,1", "--strategy", "fsdp", *offload]
    assert flow.run([*words, script]).ok().stdout == flow.python([script]).ok().stdout


WHOLE = """
    import copy
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
    average, x = copy.deepcopy(model), torch.ones(4, 6, device="cuda")
    model(x).sum().backward()
    w = model[0].weight
    average[0].weight.data = w.data
    average[2].weight = nn.Parameter(model[2].weight.detach() * 0.5)
    print(f"{average(x).sum().item():.4f} {torch.vmap(lambda row: row @ x[0])(w.detach()).sum().item():.4f}")
    w.data, average[0].weight.data = average[0].weight.data * 2, w.data
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    print(f"{average(x).sum().item():.4f} {model(x).sum().item():.4f}")
    norms = torch.stack([w.grad.norm(), x.sum(), *torch._foreach_norm([w.grad, x])])
    print(norms, (w.grad.mul_(norms[1] / norms.norm()) * w.grad.amax()).sum())
    copies = copy.deepcopy([w.detach(), w.grad, model.state_dict()["0.weight"]])
    print({copy.device for copy in [*copies, torch.tensor(w.detach()), nn.Parameter(w.detach())]})
"""


@pytest.mark.cards_and_npu
def test_offloaded_values_that_become_whole_tensors(flow: Flow) -> None:
    script = flow.write("train.py", WHOLE)
    words = ["run", "-q", "--devices", "0,1", "--strategy", "fsdp", "--cpu-offload"]
    assert flow.run([*words, script]).ok().stdout == flow.python([script]).ok().stdout


def test_prefetched_batches_of_data_that_the_script_writes(flow: Flow) -> None:
    source = """
        import torch, duoka

        run = duoka.start()
        data = torch.arange(8.0).to(run.device)
        for epoch in range(2):
            data *= 3
            print(sum((x.sum() * place).item() for place, (x,) in enumerate(run.loader((data,), batch_size=3))))
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == "114.0\n342.0\n"


def test_shares_stay_within_what_a_card_holds(flow: Flow) -> None:
    """By time, the fast card would have 14 of 16 rows of 1 MiB each, which are held twice: in use, and read ahead."""
    source = """
        import torch, duoka
        from duoka.strategies import balancing

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 16 * 60

            def __getitem__(self, index):
                return torch.ones(1 << 18)

        run = duoka.start(rows="auto", seed=0)
        model = run.model(torch.nn.Linear(1 << 18, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        seconds = {0: 1.0, 1: 9.0}
        balancing._StreamClock.seconds = lambda clock: seconds[run.rank]
        for x in run.loader(Rows(), batch_size=16):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    """
    script = flow.write("train.py", source)
    for memory, holds in (("0.125", True), ("0.04", False)):
        found = flow.run(["run", "--devices", "0,1", script], env={"SIMULATED_MEMORY": memory}).ok()
        shares = re.search(r"rows (\d+) \+ (\d+) of 16", found.stderr)
        assert shares is not None, found.stderr
        assert int(shares[1]) == 14 if holds else 8 < int(shares[1]) < 13, found.stderr


WAITS = """
    import os, time
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).cuda()
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    for step, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
        with torch.no_grad():
            out = model(x.cuda())
            if step == 4 and os.readlink("/proc/self/fd/0") == os.devnull:  # not rank 0
                time.sleep(60)
            loss = torch.nn.functional.mse_loss(out, y.cuda())
        torch.cuda.synchronize()
"""


def test_a_hang_of_a_stream_is_told(flow: Flow) -> None:
    """The host of rank 0 does not wait in the collective, which returns at once, but for its stream."""
    script = flow.write("train.py", WAITS)
    words: list[str | Path] = ["run", "-q", "--devices", "0,1", "--timeout", "3", "--log-dir", "logs", script]
    result = flow.run(words, stdin="something")
    assert result.returncode == 1
    assert re.search(
        r"duoka: rank 1 of 2 \(.*\) in step 1 has not joined all_reduce [\d,]+ at train.py:13; it is in train.py:12, "
        r"asleep; rank 0 has waited for \d s \(the limit is 3 s\)",
        result.stderr,
    ), result.stderr
    stacks = (flow.folder / "logs/rank0.stacks").read_text()
    assert 'train.py", line 13 in <module>' in stacks or 'train.py", line 14 in <module>' in stacks


def test_no_thread_follows_a_stream_after_a_run(flow: Flow) -> None:
    source = """
        import _thread, time
        import torch, duoka

        before = _thread._count()
        run = duoka.start(seed=0)
        model = run.model(torch.nn.Linear(4, 1))
        for (x,) in run.loader((torch.ones(12, 4),), batch_size=4):
            model(x).sum().backward()
        run.close()
        until = time.monotonic() + 20
        while _thread._count() > before and time.monotonic() < until:
            time.sleep(0.05)
        print(_thread._count() - before)
    """
    assert flow.run(["run", "-q", "--devices", "0,1", flow.write("train.py", source)]).ok().stdout == "0\n"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *on_npu("fsdp")])
def test_checkpoints_are_copied_through_pinned_memory(flow: Flow, strategy: str) -> None:
    source = f"""
        import torch, duoka

        def made():
            return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))

        run = duoka.start(seed=0)
        model = run.model(made(), strategy="{strategy}")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saved = run.checkpoint("saved", model=model, every_epochs=None, every_steps=2)
        for epoch in saved.epochs(1):
            for (x,) in run.loader((torch.ones(12, 6),), batch_size=4):
                model(x).square().sum().backward()
                optimizer.step()
                saved.step()
        saved.wait()
        loaded = made()
        duoka.load_weights(loaded, "saved")
        x = torch.ones(1, 6)
        print(f"{{loaded(x).sum().item():.5f}}")
    """
    script = flow.write("train.py", source)
    expected = flow.python([script]).ok().stdout
    (flow.folder / "saved").rename(flow.folder / "alone")
    counts = {"SIMULATED_COUNTS": str(flow.folder / "counts")}
    assert flow.run(["run", "-q", "--devices", "0,1", script], env=counts).ok().stdout == expected
    step = json.loads((flow.folder / "counts.0").read_text().splitlines()[2])  # after which the second was saved
    assert step["copy.to_host"] >= 4  # each parameter, or this rank's rows of it
    assert "copy.to_host.blocking" not in step


RESUMED = """
    import sys
    import torch, duoka
    from torch import nn

    run = duoka.start(seed=0)
    model = run.model(nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train = run.loader((torch.randn(30, 6),), batch_size=5, shuffle=True)
    saved = run.checkpoint(sys.argv[2], model=model, optimizer=optimizer, loader=train)
    for epoch in saved.epochs(int(sys.argv[1])):
        noise = torch.Generator(device=run.device).manual_seed(epoch)
        for (x,) in train:
            shift = torch.randn(6, generator=noise, device=run.device) + torch.rand(6, device=run.device)
            loss = model(x + shift).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        outputs = duoka.predict(model, torch.ones(7, 6))
        print(epoch, f"{loss.item():.5f}", f"{sum(output.sum().item() for output in outputs):.4f}")
"""


@pytest.mark.cards_and_npu
def test_a_run_goes_on_with_more_cards(flow: Flow) -> None:
    """From 2 to 4: weights, moments, the order of samples, and the states of generators."""
    script = flow.write("train.py", RESUMED)
    whole = flow.python([script, "4", "whole"]).ok().stdout
    first, rest = (
        flow.run(["run", "-q", "--devices", devices, script, epochs, "parts"]).ok().stdout
        for devices, epochs in (("0,1", "2"), ("4", "4"))
    )
    assert first + rest == whole


@pytest.mark.npu
@pytest.mark.parametrize("words", ["ddp", "fsdp --cpu-offload"])
def test_a_script_for_cuda_after_what_transfers_it(flow: Flow, words: str) -> None:
    """By torch_npu.contrib.transfer_to_npu, which puts its own functions before torch's."""
    source = training(
        "model.append(nn.Dropout(0.3)).cuda(1); noise = torch.rand(3, device=torch.device('cuda:1'))",
        "x, y = x.cuda(1, non_blocking=True) + noise.new_zeros(4), y.to(device='cuda:1')",
        "print(torch.cuda.max_memory_allocated(1) > 0, noise.is_cuda)",
    ).replace("import torch\n", "import torch\n    from torch_npu.contrib import transfer_to_npu\n", 1)
    script = flow.folder / "train.py"
    script.write_text(textwrap.dedent(source))  # not `flow.write`, which names NPUs
    expected = flow.python([script]).ok().stdout
    found = flow.run(["run", "--verbose", "--devices", "0,1", "--strategy", *words.split(), script]).ok()
    assert found.stdout == expected
    assert "transfer_to_npu.py" not in found.stderr  # as what is computed whole: a wrapped method has its rule


FAILS = """
    import os
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fault = os.environ["SIMULATED_FAULT"]
    for step, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=4)):
        model(x.cuda()).square().sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step == 3 and not os.path.exists(fault):
            open(fault, "w").write("1 unspecified launch failure")
"""


def test_a_card_that_fails_is_named_and_left_out(flow: Flow) -> None:
    script = flow.write("train.py", FAILS)
    words: list[str | Path] = ["run", "--devices", "0,1", "--restarts", "1", script]
    said = flow.run(words, env={"SIMULATED_FAULT": str(flow.folder / "fault")}).ok().stderr
    assert "CUDA error: unspecified launch failure" in said
    assert "duoka: raised on rank 1 of 2" in said
    assert "  GPU 1 (GPU is lost) failed, not the script" in said
    assert "`--devices 0` goes on without it" in said
    assert "GPU 1 (Simulated GPU) of rank 1 is lost, and left out from now on" in said


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_time_limit_of_a_script_s_own_collectives(flow: Flow) -> None:
    """NCCL aborts the process that has waited, and the report names the one that did not come."""
    source = """
        import os, time
        from datetime import timedelta
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", timeout=timedelta(seconds=40))
        x = torch.ones(4, device="cuda")
        for step in range(3):
            if step == 2 and dist.get_rank() == 1:
                time.sleep(150)
            dist.all_reduce(x)
            torch.cuda.synchronize()
    """
    result = flow.run(["run", "--devices", "0,1", flow.write("train.py", source)], timeout=180)
    assert result.returncode == 1
    assert re.search(
        r"duoka: rank 1 of 2 \(.*\) in step 1 has not joined all_reduce 4 at train.py:13; it is in train.py:12, "
        r"asleep; rank 0 has waited for \d+ s \(the script's own limit\)",
        result.stderr,
    ), result.stderr
