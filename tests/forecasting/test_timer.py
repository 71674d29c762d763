from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from duoka.forecasting.timer import Timer, samples
from duoka.forecasting.timing import read
from duoka.supervision.status_board import StatusBoard
from duoka.trials.observer import StepLimitReached, TrialFolders


def timer(folder: Path, steps: int, device: str) -> Timer:
    return Timer(TrialFolders(folder, folder / "scratch"), steps, 0, False, device)


@pytest.mark.parametrize(
    ("batch", "limit", "found"),
    [
        ([torch.ones(8, 3), torch.ones(8)], None, 8),
        ({"image": torch.ones(8, 3), "name": ["a"] * 8, "scale": torch.ones(())}, 8, 8),
        ([torch.ones(8, 3), torch.ones(20)], None, None),  # packed targets
        ([torch.ones(20, 8), torch.ones(20, 8)], 8, None),  # sequences first
        (["a", "b"], 2, None),
    ],
    ids=["tensors", "a dict", "other lengths", "sequences", "no tensor"],
)
def test_samples_of_a_batch(batch: Any, limit: int | None, found: int | None) -> None:
    assert samples(batch, limit) == found


@pytest.mark.parametrize(
    ("steps", "device", "window"), [(30, "cpu", 1), (30, "cuda", 4), (100, "cuda", 18), (7, "cuda", 1)]
)
def test_how_many_steps_are_timed_together(tmp_path: Path, steps: int, device: str, window: int) -> None:
    assert timer(tmp_path, steps, device).window == window


def test_a_device_is_waited_for_at_the_ends_of_windows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fake, as there is no GPU here."""
    waits: list[int] = []
    slot = StatusBoard.create(1).slot(0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(slot.steps))
    watch = timer(tmp_path, 30, "cuda").watch(slot)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for step in range(1, 30):
        slot.step(step)
        watch._after(optimizer, (), {})
        watch._after(optimizer, (), {})  # another optimizer of the same step
    slot.step(30)
    with pytest.raises(StepLimitReached):
        watch._after(optimizer, (), {})
    assert waits == [2, 6, 10, 14, 18, 22, 26, 30]
    found = read(tmp_path)
    assert (found.steps, found.counted, len(found.windows)) == (30, 20, 5)
