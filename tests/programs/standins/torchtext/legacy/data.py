"""Fields, and iterators over batches of sentences, sequence first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch


class Field:
    def __init__(self, **_: Any) -> None:
        self.vocab: list[str] = []

    def build_vocab(self, *splits: Any) -> None:
        self.vocab = sorted({word for split in splits for example in split for word in example[self]})


class Batch:
    def __init__(self, examples: list[dict[Any, Any]], inputs: Field, answers: Field) -> None:
        self.batch_size = len(examples)
        self.premise, self.hypothesis = (
            self._padded(examples, inputs, part) for part in (slice(0, 5), slice(5, None))
        )
        self.label = torch.tensor([answers.vocab.index(example[answers][0]) for example in examples])

    def _padded(self, examples: list[dict[Any, Any]], field: Field, part: slice) -> torch.Tensor:
        rows = [torch.tensor([field.vocab.index(word) for word in example[field][part]]) for example in examples]
        return torch.nn.utils.rnn.pad_sequence(rows)


class BucketIterator:
    def __init__(self, split: Any, batch_size: int, shuffle: bool) -> None:
        self.split, self.batch_size, self.shuffle = split, batch_size, shuffle

    @classmethod
    def splits(cls, splits: Any, batch_size: int, device: Any) -> list[BucketIterator]:
        return [cls(split, batch_size, shuffle=not at) for at, split in enumerate(splits)]

    def init_epoch(self) -> None:
        if self.shuffle:
            random.shuffle(self.split.examples)

    def __len__(self) -> int:
        return -(-len(self.split.examples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.split.examples), self.batch_size):
            yield Batch(self.split.examples[start : start + self.batch_size], *self.split.fields)
