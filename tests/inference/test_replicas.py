from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from duoka.errors import AskedError
from duoka.inference.replicas import calling, evaluating, is_fatal, is_out_of_memory, replicate

CPU, META = torch.device("cpu"), torch.device("meta")


def test_parameters_are_shared_where_they_are_and_buffers_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copy = replicate(model, CPU, share_buffers=False)
    assert copy is not model
    assert copy[0].weight is model[0].weight  # type: ignore[index]
    assert copy[1].running_mean is not model[1].running_mean  # type: ignore[index]
    shared = replicate(model, CPU, share_buffers=True)
    assert shared[1].running_mean.data_ptr() == model[1].running_mean.data_ptr()  # type: ignore[index,operator,union-attr]


def test_on_another_device_all_is_copied_and_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    copy = replicate(model, META, share_buffers=False)
    assert {tensor.device.type for tensor in copy.state_dict().values()} == {"meta"}
    assert copy[1].weight is copy[0].weight  # type: ignore[index]
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_a_model_that_cannot_be_copied_is_said() -> None:
    model = nn.Linear(2, 2)
    model.kept = model.weight * 2
    with pytest.raises(AskedError, match=r"a model that copy\.deepcopy can copy"):
        replicate(model, CPU, share_buffers=False)


def test_modes_are_put_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[0].eval()
    seen = []

    def fails() -> None:
        with evaluating(model):
            seen.extend(module.training for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [False] * 3
    assert [module.training for module in model.modules()] == [True, False, True]


@pytest.mark.parametrize(
    ("error", "memory", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_kinds_of_errors(error: BaseException, memory: bool, fatal: bool) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == (memory, fatal)


# The arguments of a model.


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
    return calling(model, inputs)(model, batch)


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
