from __future__ import annotations

from typing import Any

import pytest
import torch

from duoka.checkpoint.formats import LoadedTensor
from duoka.checkpoint.names import choose, differences, groups, match, plain
from duoka.errors import WeightsError


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("fc.weight", "fc.weight"),
        ("weight", "weight"),
        ("module.fc.weight", "fc.weight"),
        ("module._orig_mod.model.fc.weight", "fc.weight"),
        ("features.module.0.weight", "features.0.weight"),
        ("layers.0._checkpoint_wrapped_module.fc.weight", "layers.0.fc.weight"),
        ("decoder.model.fc.weight", "decoder.model.fc.weight"),  # a part of the model's own
        ("model", "model"),
    ],
)
def test_plain(name: str, own: str) -> None:
    assert plain(name) == own


def test_the_same_name_wins_and_what_is_not_clear_is_left() -> None:
    assert match(["a.w"], ["a.w", "module.a.w"]) == {"a.w": "a.w"}
    assert match(["a.w"], ["model.a.w", "module.a.w"]) == {}
    assert match(["model.w", "w"], ["model.w", "w"]) == {"model.w": "model.w", "w": "w"}
    assert match(["module.w"], ["_orig_mod.w"]) == {"module.w": "_orig_mod.w"}


def test_differences_are_counted() -> None:
    assert differences({"a": "module.a", "b": "module.b"}) == ["stripped 'module.' from 2 names"]
    assert differences({"model.a": "a", "b": "b"}) == ["added 'model.' to 1 name"]
    assert differences({"module.a": "_orig_mod.a"}) == ["exchanged '_orig_mod.' for 'module.' in 1 name"]


def tensor() -> LoadedTensor:
    return LoadedTensor(torch.ones(1))


@pytest.mark.parametrize(
    ("tree", "wanted", "at"),
    [
        ({"w": 1}, ["w"], ""),
        ({"state_dict": {"w": 1}}, ["w"], "state_dict"),
        ({"model": {"w": 1}, "ema": {"w": 1}}, ["w"], "model"),
        ({"ema": {"w": 1}, "mine": {"w": 1}}, ["w"], "mine"),
        ({"a": {"w": 1}, "b": {"v": 1}}, ["v"], "b"),
        ({"a": {"w": 1}, "b": {"v": 1}}, ["a.w", "b.v"], ""),
        ({"x": {"y": {"z": {"w": 1}}}}, ["w"], "x.y.z"),
        ({"model": {"v": 1}}, ["w"], "model"),
        ({"optimizer": {"w": 1}, "model": {"w": 1}}, ["w"], "model"),
        ({"G": {"w": 1}, "D": {"v": 1}}, None, ""),
        ({"mine": {"w": 1}, "optimizer": {"w": 1}}, None, "mine"),
        ({"ema": {"w": 1}, "model": {"w": 1}}, None, "model"),
    ],
)
def test_where_the_weights_are(tree: Any, wanted: list[str] | None, at: str) -> None:
    assert choose(groups(with_tensors(tree)), wanted, None, "file") == at


def with_tensors(tree: Any) -> Any:
    return {key: with_tensors(it) for key, it in tree.items()} if isinstance(tree, dict) else tensor()


def test_nothing_and_too_much() -> None:
    with pytest.raises(WeightsError, match="holds no tensors that could be weights"):
        choose(groups({"epoch": 3}), ["w"], None, "file")
    with pytest.raises(WeightsError, match="choose one by key=: 'a', 'b'"):
        choose(groups(with_tensors({"a": {"w": 1}, "b": {"w": 1}})), ["w"], None, "file")
