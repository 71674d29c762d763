"""A metric, which the original would download: the share of predictions that are right."""

from __future__ import annotations

from typing import Any

import torch


class _Metric:
    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        self._right += (torch.as_tensor(predictions) == torch.as_tensor(references)).tolist()

    def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions, references)
        right, self._right = self._right, []
        return {"accuracy": sum(right) / len(right)}


def load(*_: str, **__: Any) -> _Metric:
    return _Metric()
