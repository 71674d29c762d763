"""The simulated cards behave as real ones where programs rely on it."""

from __future__ import annotations

import json

import pytest

from tests.flows.flow import Flow

pytestmark = pytest.mark.cards


def test_a_fork_after_cuda_was_asked_for_has_none(flow: Flow) -> None:
    source = """
        import os, torch
        print(torch.cuda.device_count())
        if os.fork() == 0:
            torch.ones(1, device="cuda")
            os._exit(0)
        print(os.wait()[1])
        print(torch.cuda.is_available(), flush=True)
        if os.fork() == 0:
            try:
                torch.ones(1, device="cuda")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
    """
    count, first, available, second = flow.python([flow.write("train.py", source)]).ok().stdout.splitlines()[:4]
    assert (count, first, available) == ("4", "0", "True")
    assert second.startswith("Cannot re-initialize CUDA in forked subprocess")


MISSING_WAITS = {
    "a stream reads what another writes": """
        x = torch.zeros(9, device="cuda")
        with torch.cuda.stream(side):
            y = x + 1
    """,
    "a stream writes what another reads": """
        x = torch.zeros(9, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        y = x + 1
        with torch.cuda.stream(side):
            x.zero_()
    """,
    "the current stream reads what a side stream has copied": """
        with torch.cuda.stream(side):
            x = torch.zeros(9).pin_memory().to("cuda", non_blocking=True)
        print(x.sum())
    """,
}


@pytest.mark.parametrize("what", MISSING_WAITS)
def test_a_missing_wait_is_an_error(flow: Flow, what: str) -> None:
    head = "import torch\nside = torch.cuda.Stream()\n"
    script = flow.write("train.py", MISSING_WAITS[what])
    script.write_text(head + script.read_text())
    assert "simulated race" in flow.python([script]).stderr


def test_a_wait_orders_streams(flow: Flow) -> None:
    source = """
        import torch
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        x = torch.zeros(9, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
            event.record()
        torch.cuda.current_stream().wait_event(event)
        y.record_stream(torch.cuda.current_stream())
        print(int(y.sum()))
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == "9\n"


def test_memory_freed_while_another_stream_reads_it(flow: Flow) -> None:
    source = """
        import sys, torch
        side = torch.cuda.Stream()
        x = torch.zeros(9, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if sys.argv[1] == "record":
            x.record_stream(side)
        del x
        torch.cuda.synchronize()
        print("over")
    """
    script = flow.write("train.py", source)
    assert flow.python([script, "record"]).ok().stdout == "over\n"
    freed = flow.python([script, "free"])
    assert freed.returncode == 97
    assert "without record_stream" in freed.stderr


def test_copies_to_pinned_memory_arrive_when_the_host_has_waited(flow: Flow) -> None:
    source = """
        import torch
        there = torch.arange(3, device="cuda")
        here = torch.zeros(3, dtype=torch.long).pin_memory()
        here.copy_(there, non_blocking=True)
        print(here.tolist() == [0, 1, 2])
        torch.cuda.synchronize()
        print(here.tolist() == [0, 1, 2])
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == "False\nTrue\n"


@pytest.mark.parametrize("blocking", [False, True])
def test_an_index_out_of_range_is_an_assert_of_the_card(flow: Flow, blocking: bool) -> None:
    source = """
        import torch
        from torch.nn import functional as F
        table = torch.ones(4, 2, device="cuda")
        out = F.embedding(torch.tensor([1, 9], device="cuda"), table)
        print("went on", flush=True)
        out.sum().item()
    """
    result = flow.python([flow.write("train.py", source)], env={"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {})
    assert result.stdout == ("" if blocking else "went on\n")
    assert "error: device-side assert triggered" in result.stderr
    assert result.returncode == 1


def test_memory_ends(flow: Flow) -> None:
    source = """
        import torch
        x = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:1")
        print(torch.cuda.memory_allocated(1) >> 20, torch.cuda.mem_get_info(1)[0] >> 20)
        try:
            y = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:1")
        except torch.OutOfMemoryError as error:
            print(str(error)[:18])
        z = torch.empty(300 << 20, dtype=torch.uint8, device="cuda:0")
        print(torch.cuda.max_memory_allocated(1) >> 20)
    """
    said = flow.python([flow.write("train.py", source)], env={"SIMULATED_MEMORY": "0.5"}).ok().stdout
    assert said.splitlines() == ["300 212", "CUDA out of memory", "300"]


def test_every_card_has_its_generator(flow: Flow) -> None:
    source = """
        import torch
        torch.manual_seed(3)
        one, other = (torch.rand(4, device=f"cuda:{card}").cpu() for card in range(2))
        print(torch.equal(one, other), torch.equal(one, torch.rand(4, device="cuda").cpu()))
        torch.cuda.manual_seed(3)
        print(torch.equal(one, torch.rand(4, device="cuda").cpu()))
    """
    assert flow.python([flow.write("train.py", source)]).ok().stdout == "True False\nTrue\n"


def test_counts(flow: Flow) -> None:
    source = """
        import torch
        w = torch.ones(3, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(2):
            loss = (w * torch.ones(3).pin_memory().to("cuda", non_blocking=True)).sum()
            loss.backward()
            optimizer.step()
            loss.item(), w.cpu(), torch.cuda.synchronize()
    """
    flow.python([flow.write("train.py", source)], env={"SIMULATED_COUNTS": str(flow.folder / "counts")}).ok()
    step = json.loads((flow.folder / "counts.0").read_text().splitlines()[1])
    assert step.pop("kernels") > 3
    step = {name: count for name, count in step.items() if name.startswith(("sync", "copy"))}
    assert step == {"sync.item": 1, "copy.to_host.blocking": 1, "sync.device": 1, "copy.to_card": 1}
