"""What needs a GPU: a step and loading on one, and a step on two, beside nn.DataParallel and DDP by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, duoka_on, in_turn, told
from benchmarks.table import Row

STEP, LOADING = SCRIPTS / "cuda_step.py", SCRIPTS / "cuda_loading.py"
MODELS = {"mlp": "an MLP, batch 1024", "cnn": "a CNN, batch 256 of 3x64x64"}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports the loss, microseconds for a batch; nothing where there is no GPU."""
    count = torch.accelerator.device_count()
    if count > 0:
        yield from on_one("0,", 1 if quick else ROUNDS)
    if count > 1:
        yield from on_two("0,1", 1 if quick else ROUNDS)


def on_one(devices: str, rounds: int) -> Iterator[Row]:
    """devices: what `duoka run` gets."""
    for model, words in MODELS.items():
        contestants = {
            "duoka": told(duoka_on(devices, STEP, model)),
            "python": told([BIN / "python", STEP, model]),
        }
        times = in_turn(contestants, rounds, "ms")
        yield Row(f"{words}: a step on one GPU, duoka run against python", times["duoka"], times["python"], 1.03)
    contestants = {
        "duoka": told(duoka_on(devices, LOADING, "duoka")),
        "torch": told([BIN / "python", LOADING, "torch"]),
    }
    times = in_turn(contestants, rounds, "us")
    what = "batches of 256 of 3x64x64 to the GPU: run.loader against DataLoader with pinned memory"
    yield Row(what, times["duoka"], times["torch"], 1.0)


def on_two(devices: str, rounds: int) -> Iterator[Row]:
    """devices: two of them."""
    for model, words in MODELS.items():
        contestants = {
            "duoka": told(duoka_on(devices, STEP, model)),
            "ddp": told(duoka_on(devices, "--kind", "distributed", STEP, model, "ddp")),
            "dp": told([BIN / "python", STEP, model, "dp"]),
        }
        times = in_turn(contestants, rounds, "ms")
        yield Row(f"{words}: a step on 2 GPUs, against DDP by hand", times["duoka"], times["ddp"], 1.03)
        yield Row(f"{words}: a step on 2 GPUs, against nn.DataParallel", times["duoka"], times["dp"], 1.0)
