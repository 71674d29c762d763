"""A picture of one or three channels."""

from __future__ import annotations

from typing import Any

import numpy as np


class Image:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.array

    def convert(self, mode: str) -> Image:
        return self

    def split(self) -> list[Image]:
        return [Image(self.array[..., channel]) for channel in range(3)]

    def copy(self) -> Image:
        return Image(self.array.copy())


def open(path: str) -> Image:  # noqa: A001
    with np.load(path) as arrays:
        return Image(arrays["picture"])
