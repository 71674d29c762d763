"""Recordings with given tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from duoka.proving.recorder import BatchRecorder
from duoka.proving.recording import Recording, RecordingWriter


def record(
    folder: Path,
    states: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Tensor] = (),
    gradients: Mapping[int, Mapping[str, Tensor]] | None = None,
) -> Recording:
    """Record a run with these tensors before its first step and after each; one batch for each step.

    gradients: of some steps.
    """
    folder.mkdir()
    writer = RecordingWriter(folder, len(states))
    for step, tensors in enumerate(states):
        of_step = (gradients or {}).get(step, {})
        writer.add((f"gradient of {name}", gradient, "gradient") for name, gradient in of_step.items())
        writer.add((name, tensor, "parameter") for name, tensor in tensors.items())
        writer.end(step, [0.5])
    writer.close()
    seen = BatchRecorder(folder, 0, own_rows=False)
    for step, batch in enumerate(batches, 1):
        seen.step = step
        seen._write("loader", batch)
    seen.close()
    return Recording(folder)


def cut(recording: Recording, sizes: Sequence[int]) -> Recording:
    """Rewrite a recording as ranks with so many rows of each batch would write it."""
    lines = [json.loads(line) for line in (recording.folder / "batches-0.jsonl").read_text().splitlines()]
    start = 0
    for rank, size in enumerate(sizes):
        own = []
        for line in lines:
            rows = slice(16 * start, 16 * (start + size))
            leaves = [{**leaf, "kind": "cut", "rows": leaf["rows"][rows]} for leaf in line["leaves"]]
            own.append(json.dumps({**line, "leaves": leaves}) + "\n")
        (recording.folder / f"batches-{rank}.jsonl").write_text("".join(own))
        start += size
    return Recording(recording.folder)


def weights(value: float = 1.0, count: int = 4) -> dict[str, Tensor]:
    """Return one tensor, whose last number is `value`."""
    tensor = torch.ones(count)
    tensor[-1] = value
    return {"model.weight": tensor}
