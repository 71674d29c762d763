"""Changes to pictures, which are arrays of (height, width[, channels]) here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class ToTensor:
    def __call__(self, picture: Any) -> Tensor:
        array = np.atleast_3d(np.asarray(picture))
        return torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous().float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))

    def __call__(self, picture: Tensor) -> Tensor:
        return (picture - self.mean) / self.std


class Resize:
    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, picture: Any) -> Any:
        array = np.asarray(picture)
        rows, columns = (np.arange(new) * old // new for new, old in zip(self.size, array.shape, strict=False))
        return array[rows][:, columns]


class CenterCrop(Resize):
    pass


class Lambda:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, picture: Any) -> Any:
        return self.function(picture)


class RandomHorizontalFlip:
    def __call__(self, picture: Any) -> Any:
        return np.asarray(picture)[:, ::-1] if torch.rand(1) < 0.5 else picture
