from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duoka.checkpoint.formats import LoadedTensor
from duoka.checkpoint.states import join, split
from duoka.errors import CheckpointError

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
) | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([1, 2]), Path("a/b")])
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text()) | st.just("$tuple")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.frozensets(st.text()),
)


def through(value: Any) -> Any:
    tree, tensors = split(value, "at")
    stored = {name: LoadedTensor(tensor) for name, tensor in tensors.items()}
    return join(json.loads(json.dumps(tree, allow_nan=False)), stored, reads=True)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    if isinstance(one, complex) and one != one:
        return isinstance(other, complex) and repr(one) == repr(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert alike(value, through(value))


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        Counter("aab"),
        deque([1, 2], maxlen=3),
        {1, 2},
        bytearray(b"x"),
        np.float32(0.1),
        np.int64(3),
        random.getstate(),
        {"1": 2, 1: 3},
        {"$x": 1},
    ],
)
def test_other_kinds(value: Any) -> None:
    again = through(value)
    assert again == value
    assert type(again) is type(value)


def test_tensors_and_arrays() -> None:
    value = {1: torch.ones(2), "1": torch.zeros(3), "a.b": torch.ones(()), "a": {"b": torch.zeros(0)}}
    again = through(value)
    assert all(torch.equal(again[key], value[key]) for key in (1, "1", "a.b"))  # type: ignore[arg-type]
    assert again["a"]["b"].shape == (0,)
    for array in (np.arange(6, dtype=np.uint32).reshape(2, 3)[:, ::2], np.zeros(()), np.array([True])):
        again = through([array])[0]
        assert again.dtype == array.dtype
        assert np.array_equal(again, array)
    assert isinstance(through(torch.nn.Parameter(torch.ones(1))), Tensor)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [print]}, r"a\.0 is of type builtins\.builtin_function_or_method"),
        (object(), "a value is of type builtins.object"),
        (np.array([None]), "ndarray"),
        ({"a": range(3)}, r"builtins\.range"),
    ],
)
def test_what_needs_code_is_refused(value: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        split(value)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contains itself"):
        split(value)
