"""torch's fast paths of attention in evaluation, which it takes for tensors of its own types only.

A transformer encoder, its layer and `nn.MultiheadAttention` compute each sequence by itself then, so they are called
with this rank's rows. An encoder also leaves padded positions out and sets them to 0, if in all sequences they come
last; the ranks agree on that. Encoders with other parts are computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.private.torch import GLOBAL_HOOKS, HOOKS_OF_MODULE, padding_comes_last, parameters_in
from duoka.view.rules.lookup import same_rows
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs

_ARGUMENTS = {  # of `forward`
    nn.TransformerEncoder: ("src", "mask", "padding"),
    nn.TransformerEncoderLayer: ("src", "mask", "padding"),
    nn.MultiheadAttention: ("query", "key", "value", "padding", "need_weights", "mask"),
}
WITH_FAST_PATH = tuple(_ARGUMENTS)
_NAMES = {"attn_mask": "mask", "src_mask": "mask", "key_padding_mask": "padding", "src_key_padding_mask": "padding"}
_PARTS: tuple[Any, ...] = (
    nn.ModuleList,
    nn.Dropout,
    nn.LayerNorm,
    nn.Linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)
_FORWARD: dict[Any, Any] = {kind: kind.forward for kind in (*_ARGUMENTS, *_PARTS, nn.ReLU, nn.GELU)}


def takes_rows(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a call computes each row by itself, and may be made with the local rows of its batches."""
    kind = type(module)
    if kind not in _ARGUMENTS or module.training or not args or type(args[0]) is not BatchTensor:
        return False
    spec, view = args[0]._spec, args[0]._spec.view
    if args[0].dim() != 3 or view.shares.exact or (view.has_sharded and kind is not nn.TransformerEncoder):
        return False
    tensors: list[Tensor] = [*module.parameters()] if torch.is_grad_enabled() else []
    for name, value in _by_name(module, args, kwargs).items():
        if type(value) is BatchTensor:
            if name == "mask" or value._spec.dim != 0 or not same_rows(value._spec, spec):
                return False
            tensors.append(value._rows)
        elif isinstance(value, Tensor) and (name != "mask" or value.dim() != 2):
            return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return not any(GLOBAL_HOOKS) and all(map(_is_torchs, module.modules()))


def _by_name(module: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by the names of `_ARGUMENTS`."""
    return dict(zip(_ARGUMENTS[type(module)], args, strict=False)) | {
        _NAMES.get(name, name): value for name, value in kwargs.items()
    }


def _is_torchs(part: nn.Module) -> bool:
    """Return True for a part that computes what torch's own does, without dropout, and for each row by itself."""
    kind, attributes = type(part), vars(part)
    if (
        _FORWARD.get(kind) is not kind.forward
        or part.training
        or "forward" in attributes
        or any(map(attributes.get, HOOKS_OF_MODULE))
    ):
        return False
    if kind is nn.MultiheadAttention:
        return bool(attributes["batch_first"])
    activation = attributes.get("activation")
    return kind is not nn.TransformerEncoderLayer or activation is None or activation in (F.relu, F.gelu)


def pads_alike(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Return True if all ranks take the same path with a mask of padded positions."""
    padding, attributes = _by_name(module, args, kwargs).get("padding"), vars(module)
    if padding is None or not (attributes.get("use_nested_tensor") and attributes["mask_check"]):
        return True
    comes_last = padding_comes_last(args[0]._local, padding._local.logical_not())
    return not args[0]._spec.view.shares.processes.is_true_anywhere(not comes_last)


def leaves_out_padding(module: nn.Module) -> bool:
    """Return True if torch takes its fast path with plain tensors."""
    fast = isinstance(module, nn.TransformerEncoder) and not module.training and not torch.is_grad_enabled()
    return fast and bool(module.use_nested_tensor)


@contextmanager
def with_whole_parameters(module: nn.Module) -> Iterator[None]:
    """Put whole parameters in place of a module's sharded ones while the context is open."""
    replaced = []
    for part in module.modules():
        for name, parameter in list(parameters_in(part).items()):
            if (unsharded := getattr(parameter, "duoka_unsharded", None)) is not None:
                replaced.append((parameters_in(part), name, parameter))
                parameters_in(part)[name] = unsharded()
    try:
        yield
    finally:
        for table, name, parameter in replaced:
            table[name] = parameter
