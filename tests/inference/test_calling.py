from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from duoka.errors import AskedError
from duoka.inference.calling import Calling


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("one", x)


class Optional(nn.Module):
    def forward(self, x: Any, mask: Any = None) -> Any:
        return (x, mask)


class Both(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return (x, mask)


class Any_(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs)


def called(model: nn.Module, batch: Any, inputs: Any = None) -> Any:
    return Calling(model, inputs)(model, batch)


def test_labels_are_left_out_where_forward_takes_one() -> None:
    assert called(One(), ("x", 1)) == ("one", "x")
    assert called(One(), [torch.ones(1), torch.zeros(1)])[1].item() == 1
    assert called(Both(), (1, 2, 3)) == (1, 2)


def test_all_of_it_where_forward_takes_all() -> None:
    assert called(Both(), (1, 2)) == (1, 2)
    assert called(Optional(), (1,)) == (1, None)
    assert called(Any_(), (1, 2)) == ((1, 2), {})


def test_names() -> None:
    assert called(Both(), {"mask": 2, "x": 1}) == (1, 2)
    assert called(Any_(), {"a": 1}) == ((), {"a": 1})
    assert called(One(), {"ids": 1, "words": 2}) == ("one", {"ids": 1, "words": 2})


def test_strings_are_one_thing() -> None:
    assert called(One(), ["a", "b"]) == ("one", ["a", "b"])


@pytest.mark.parametrize(("model", "batch", "takes"), [(Optional(), (1, 2), "1 to 2"), (Both(), (1,), "2")])
def test_what_is_open_is_not_guessed(model: nn.Module, batch: Any, takes: str) -> None:
    with pytest.raises(AskedError, match=f"a batch has {len(batch)} parts, and forward takes {takes}; say which"):
        called(model, batch)


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        (lambda batch: batch[1], (2, None)),
        (lambda batch: (batch[1], batch[0]), (2, 1)),
        (lambda batch: {"x": 9}, (9, None)),
    ],
)
def test_inputs_decide(inputs: Any, given: Any) -> None:
    assert called(Optional(), (1, 2), inputs) == given
