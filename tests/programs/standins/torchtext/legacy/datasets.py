"""Sentences of made-up words; their label says whether the two begin alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class SNLI:
    def __init__(self, n: int, seed: int, inputs: Any, answers: Any) -> None:
        rng = random.Random(seed)
        random.seed(0)  # for a program that seeds nothing
        self.fields = inputs, answers
        self.examples = []
        for _ in range(n):
            words = [f"word{rng.randrange(60)}" for _ in range(5 + rng.randrange(3, 9))]
            self.examples.append({inputs: words, answers: ["no" if words[0] < words[5] else "yes"]})

    @classmethod
    def splits(cls, inputs: Any, answers: Any) -> list[SNLI]:
        return [cls(n, seed, inputs, answers) for seed, n in enumerate((300, 90, 90))]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.examples)

    def __len__(self) -> int:
        return len(self.examples)
