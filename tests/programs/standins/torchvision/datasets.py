"""Pictures that belong to classes: a pattern for each, and noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

TRAIN, TEST, FAKE = 384, 160, 64


class _Pictures(Dataset[Any]):
    shape: tuple[int, ...]

    def __init__(
        self, root: str, train: bool = True, transform: Callable[[Any], Any] | None = None, **_: Any
    ) -> None:
        n = TRAIN if train else TEST
        rng = np.random.default_rng(train)
        patterns = np.random.default_rng(7).integers(0, 256, (10, *self.shape))
        self.targets: Any = rng.integers(0, 10, n)
        noise = rng.integers(0, 256, (n, *self.shape))
        self.data: Any = ((patterns[self.targets] + noise) // 2).astype(np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = np.asarray(self.data[index])
        return (self.transform(picture) if self.transform else picture), int(self.targets[index])


class MNIST(_Pictures):
    shape = (28, 28)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data, self.targets = torch.from_numpy(self.data), torch.from_numpy(self.targets)


class CIFAR10(_Pictures):
    shape = (32, 32, 3)


class FakeData(Dataset[Any]):
    """As the original: seeds torch for each picture, and puts its state back."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, ...] = (3, 224, 224),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.size, self.image_size, self.num_classes, self.transform = (
            min(size, FAKE),
            image_size,
            num_classes,
            transform,
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        state = torch.get_rng_state()
        torch.manual_seed(index)
        picture = (torch.rand(self.image_size) * 255).byte().permute(1, 2, 0).numpy()
        target = int(torch.randint(0, self.num_classes, (1,)).item())
        torch.set_rng_state(state)
        return (self.transform(picture) if self.transform else picture), target
