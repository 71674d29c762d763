"""`tensorboard:DIR`."""

from __future__ import annotations

from duoka.logs.base import Log, Value, library


class TensorBoard(Log):
    """A log for TensorBoard: writes numbers as scalars and strings as text."""

    def __init__(self, place: str) -> None:
        library("tensorboard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(place)

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()
