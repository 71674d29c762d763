"""`wandb` or `wandb:PROJECT`."""

from __future__ import annotations

from duoka.logs.base import Log, Value, library


class Wandb(Log):
    """A Weights & Biases run. A run that the script has started is used, and not finished."""

    def __init__(self, place: str) -> None:
        wandb = library("wandb", "wandb", "wandb")
        self._own = wandb.run is None
        self._run = wandb.init(project=place or None) if self._own else wandb.run

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        if self._own:
            self._run.finish(exit_code=int(failed))
