"""What a tensor says of itself: of the whole batch, without a collective."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from duoka.view.batch import BatchTensor, Rule
from duoka.view.rules.lookup import Function, functions, getters

GLOBAL = "size dim ndimension numel nelement __len__ __hash__ element_size is_floating_point is_complex is_same_size"
GLOBAL_GETTERS = (
    "shape ndim dtype device layout itemsize nbytes is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_quantized names"
)
LOCAL = "retain_grad is_contiguous get_device is_inference is_conj is_neg is_signed is_pinned type is_shared"
LOCAL_GETTERS = "requires_grad is_leaf grad_fn retains_grad output_nr _version"


def of_the_whole(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asked of the batch tensor itself, which has the global shape."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def of_the_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asked of this rank's rows; what is true of them is true of all ranks'."""
    if func is Tensor.type and (len(args) > 1 or kwargs):  # a conversion, not a question
        return BatchTensor(func(args[0]._local, *args[1:], **kwargs), args[0]._spec)
    return func(args[0]._local, *args[1:], **kwargs)


def data(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.data`: the same memory, out of autograd's sight."""
    return BatchTensor(args[0]._local.data, args[0]._spec)


def deepcopy(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A batch of its own."""
    return BatchTensor(copy.deepcopy(args[0]._local, args[1]), args[0]._spec)


def is_tensor(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.is_tensor` and its like."""
    return True


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(GLOBAL), of_the_whole),
    **dict.fromkeys(getters(GLOBAL_GETTERS), of_the_whole),
    **dict.fromkeys(functions(LOCAL), of_the_rows),
    **dict.fromkeys(getters(LOCAL_GETTERS), of_the_rows),
    **dict.fromkeys(getters("data"), data),
    Tensor.__deepcopy__: deepcopy,
    torch.is_tensor: is_tensor,
}
