"""Ctrl-C that all ranks answer at one place of the script."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from duoka.supervision import interruption
from duoka.supervision.interruption import Interruption
from duoka.supervision.status_board import StatusBoard, StatusSlot
from tests.flows.flow import Flow
from tests.flows.test_restarts import until

SAVES = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer, steps = torch.optim.Adam(net.parameters()), 0
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    try:
        while True:
            for x, y in DataLoader(data, batch_size=8):
                loss = F.mse_loss(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
                if steps == 10:
                    print("trains", flush=True)
    except KeyboardInterrupt:
        torch.save((net.state_dict(), steps), "saved.pt")
        print("saved", torch.load("saved.pt")[1] == steps, net(data.tensors[0]).isfinite().all().item())
"""


@pytest.mark.cpu_and_cards(long=True)
@pytest.mark.parametrize("words", [["cpu:2"], ["cpu:3", "--strategy", "fsdp"], ["cpu:2", "--strategy", "exact"]])
def test_a_script_that_saves_at_ctrl_c(flow: Flow, words: list[str]) -> None:
    running = flow.start(["run", "-q", "--devices", *words, flow.script(flow.write("train.py", SAVES))])
    until(lambda: "trains" in running.stdout())
    running.send(signal.SIGINT)
    result = running.wait()
    assert (result.returncode, result.stdout) == (0, "trains\nsaved True True\n"), result


@pytest.fixture
def board() -> StatusBoard:
    return StatusBoard.create(2)


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def collectives(slot: StatusSlot, count: int) -> None:
    for _ in range(count):
        slot.begin_collective(0, "all_reduce")


@pytest.mark.usefixtures("handled")
def test_a_rank_goes_on_until_none_is_ahead_of_it(board: StatusBoard) -> None:
    here = Interruption(board, 0)
    here.install()
    ahead = board.slot(1)
    collectives(ahead, 2)
    board.interrupt()
    here.check(1)
    here.check(2)
    board.stop_before(1, 3)
    with pytest.raises(KeyboardInterrupt):
        here.check(3)
    here.check(3)  # of what the script does then


@pytest.mark.usefixtures("handled")
def test_a_rank_whose_signal_comes_late_does_not_raise_twice(board: StatusBoard) -> None:
    here = Interruption(board, 0)
    here.install()
    board.interrupt()
    board.stop_before(1, 1)
    with pytest.raises(KeyboardInterrupt):
        here.check(1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # of the script itself, or of somebody else
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handled")
def test_without_a_collective_a_rank_raises_where_it_is(board: StatusBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "TO_AGREE", 0.01)
    Interruption(board, 0).install()
    board.interrupt()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(60)


@pytest.mark.usefixtures("handled")
def test_when_the_script_has_ended_it_raises_no_more(board: StatusBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "TO_AGREE", 0.1)
    here = Interruption(board, 0)
    here.install()
    board.interrupt()
    signal.raise_signal(signal.SIGINT)
    here.finish()  # the script got an error of a rank that has raised
    time.sleep(0.3)  # atexit functions
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handled")
def test_a_signal_that_the_command_did_not_send_is_python_s(board: StatusBoard) -> None:
    Interruption(board, 0).install()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handled")
def test_a_handler_of_the_script_is_called_alone(board: StatusBoard) -> None:
    here, calls = Interruption(board, 0), []
    here.install()
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    board.interrupt()
    here.check(1)
    signal.raise_signal(signal.SIGINT)
    assert calls == [1]
