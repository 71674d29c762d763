"""Scripts with their own torch.distributed that save, are asked to end, are killed, and go on."""

from __future__ import annotations

import signal

import pytest

from tests.flows.flow import Flow
from tests.flows.group import until

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import duoka

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with duoka.Checkpoint("out", {"model": model, "optimizer": optimizer}, every_steps=1) as saved:
    saved.restore()
    if dist.get_rank() == 0:
        print("from", saved.step_number, flush=True)
    while saved.step_number < 8:
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saved.step()
        if dist.get_rank() == 0:
            print(saved.step_number, loss.item(), flush=True)
        time.sleep(float(sys.argv[1]))
"""


def run(flow: Flow, workers: int, pause: float) -> list[str | int]:
    return ["run", "--quiet", "--devices", f"cpu:{workers}", flow.write("train.py", SCRIPT), str(pause)]  # type: ignore[list-item]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_goes_on_with_other_ranks(number: signal.Signals, flow: Flow) -> None:
    running = flow.start(run(flow, 2, 0.2))  # type: ignore[arg-type]
    until(lambda: "\n3 " in running.stdout())
    running.send(number)
    ended = running.wait()
    assert ended.returncode == (75 if number == signal.SIGTERM else 137), ended
    again = flow.run(run(flow, 3, 0)).ok()  # type: ignore[arg-type]
    first, *rest = again.stdout.splitlines()
    assert int(first.split()[1]) >= 2
    assert rest[-1].startswith("8 ")
