from __future__ import annotations

import math

import pytest

from duoka.watching.numbers import numbers_in

LINES = {
    "loss 0.5": {"loss": 0.5},
    "step 200: train loss 4.28, val loss 1e-3": {"step": 200, "train loss": 4.28, "val loss": 1e-3},
    "iter 0: loss 4.2664, time 58.02ms, mfu -100.00%": {"iter": 0, "loss": 4.2664, "time": 58.02, "mfu": -100},
    "Epoch 3/10: acc=91.2%  lr=.5": {"Epoch": 3, "acc": 91.2, "lr": 0.5},
    "Test set: Average loss: 0.2713, Accuracy: 9245/10000 (92%)": {"Average loss": 0.2713, "Accuracy": 9245},
    "{'loss': 0.25, 'grad_norm': 1.5e+2, 'epoch': 0.1}": {"loss": 0.25, "grad_norm": 150, "epoch": 0.1},
    "loss: tensor(0.75, grad_fn=<MeanBackward0>)": {"loss": 0.75},
    "val/loss=2, layer1.weight 3": {"val/loss": 2, "layer1.weight": 3},
    "\x1b[1mloss\x1b[0m 0.5": {"loss": 0.5},
    "损失：0.5": {"损失": 0.5},  # noqa: RUF001
    " 45%|####     | 45/100 [00:04<00:05,  9.93it/s, loss=0.123]": {"loss": 0.123},
    "2026-11-22 19:00:01,123 INFO acc 1.": {"INFO acc": 1},
    "torch 2.13.0 on node1, took 12:30, saved to out/3.pt, port 127.0.0.1": {},
    "loss inf, acc nan": {"loss": math.inf, "acc": math.nan},
    "information about nanometers 5x5": {},
}


@pytest.mark.parametrize("line", LINES)
def test_numbers_of_a_line(line: str) -> None:
    assert dict(numbers_in(line)) == pytest.approx(LINES[line], nan_ok=True)


def test_a_long_line_takes_no_long_time() -> None:
    """A search that tries all cuts of a line would take years."""
    assert list(numbers_in("a b c d e f " * 20_000)) == []
    assert list(numbers_in("a." * 200_000)) == []
