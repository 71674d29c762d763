"""A model in parts, with `--strategy fsdp`, beside torch's `fully_shard` by hand, on CPUs; and its weights saved."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from benchmarks.runs import SCRIPTS, Samples, duoka, in_turn, output, told, torchrun
from benchmarks.table import Row

SCRIPT, SAVING = SCRIPTS / "sharded.py", SCRIPTS / "sharded_saving.py"
ROUNDS = 2
WHAT = {"step": ("ms", "step"), "memory": ("MB", "growth of rank 0"), "live": ("MB", "tensors of rank 0 at the peak")}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step; MB that rank 0 grows by, and of its tensors at the peak; saving the weights.

    With 200 million parameters a rank of two needs 3 GB.
    """
    for millions in (20,) if quick else (20, 200):
        for what in WHAT:
            yield _beside_by_hand(what, millions, 2, quick)
    if not quick:
        yield _beside_by_hand("live", 200, 4, quick)
    for ranks in (2,) if quick else (2, 4):
        for file in ("model.safetensors", "model.pth"):
            yield from _saving(ranks, file, quick)


def _beside_by_hand(what: str, millions: int, ranks: int, quick: bool) -> Row:
    unit, words = WHAT[what]
    large = ("large",) if millions == 200 else ()
    found = in_turn(
        {
            "duoka": told(duoka(ranks, "--strategy", "fsdp", SCRIPT, what, *large)),
            "by hand": told(torchrun(ranks, SCRIPT, what, *large, "by_hand")),
        },
        1 if quick else ROUNDS,
        unit,
        warm_up=False,
    )
    line = f"{millions} million parameters with AdamW in parts, {words}, {ranks} workers: duoka against fully_shard"
    return Row(line, found["duoka"], found["by hand"], bar=1.05 if what == "step" else 1.0)


def _saving(ranks: int, file: str, quick: bool) -> Iterator[Row]:
    size = () if quick else ("large",)
    with tempfile.TemporaryDirectory() as folder:
        *times, (grown, largest) = (
            [float(word) for word in line.split()]
            for line in output(duoka(ranks, SAVING, folder, "1" if quick else "5", file, *size)).splitlines()
        )
    saved, written = (Samples(tuple(values), "s") for values in zip(*times, strict=True))
    kind = (
        f"{'80 MB' if quick else '800 MB'} of weights in parts, saved as {file.partition('.')[2]} by {ranks} workers"
    )
    yield Row(f"{kind}: against one process that writes as many bytes", saved, written, bar=1.1)
    yield Row(
        f"{kind}: growth of a rank against the largest shard", Samples((grown,), "MB"), Samples((largest,), "MB"), 1.0
    )
