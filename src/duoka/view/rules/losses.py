"""Rules for losses: numerator and denominator are all-reduced together."""

from __future__ import annotations

import inspect
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.lookup import NotByRows, align, localise, rows_in
from duoka.view.rules.reductions import whole_mean, whole_sum
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule


@lru_cache(maxsize=64)
def _parameters(func: Function) -> tuple[tuple[str, ...], dict[str, Any]]:
    parameters = inspect.signature(func).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    return tuple(parameters), defaults


def _bound(func: Function, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return all arguments by name; raise NotByRows for a reduction that torch refuses, or that is deprecated."""
    names, defaults = _parameters(func)
    arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        raise NotByRows
    reduction = arguments.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum") and (reduction != "batchmean" or func is not F.kl_div):
        raise NotByRows
    return arguments


def class_loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """cross_entropy and nll_loss, with class weights, ignore_index, label smoothing and soft targets."""
    arguments = _bound(func, args, kwargs)
    scores, target, reduction = arguments["input"], arguments["target"], arguments.pop("reduction")
    spec = next(side._spec for side in (scores, target, arguments["weight"]) if isinstance(side, BatchTensor))
    if spec.dim != 0 or scores.dim() < 2 or isinstance(arguments["weight"], BatchTensor):
        return NotImplemented
    scores, target = rows_in(scores, spec, 0), rows_in(target, spec, 0)
    arguments.update(input=scores, target=target)
    if reduction == "none":
        return BatchTensor(func(**arguments, reduction="none"), spec)
    numerator, dtype = _sum_of(func, arguments)
    if reduction == "sum":
        return spec.view.all_sum(numerator).to(dtype)
    if target.is_floating_point():  # soft targets: torch divides by the number of places
        places = spec.size * prod(scores.shape[2:])
        return (spec.view.all_sum(numerator) / places).to(dtype)
    both = torch.stack([numerator, _weight_of(target, arguments).to(numerator.dtype)])
    total, weight = spec.view.all_sum(both)
    return (total / weight).to(dtype)


def _sum_of(func: Function, arguments: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
    """Return the sum of a loss, in at least 32 bits (16 may overflow), and the dtype of the result."""
    if arguments["input"].dtype in (torch.float16, torch.bfloat16):
        each = func(**arguments, reduction="none")
        return each.float().sum(), each.dtype
    total = func(**arguments, reduction="sum")
    return total, total.dtype


def _weight_of(target: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the denominator of torch's mean: the class weights (or the number) of the targets not ignored."""
    counted = target != arguments["ignore_index"]
    if arguments["weight"] is None:
        number: Tensor = counted.sum()
        return number
    weights: Tensor = arguments["weight"][target.masked_fill(~counted, 0)]
    weight: Tensor = (weights * counted).sum().detach()
    return weight


def row_loss(operands: str, mean_by_weight: bool = False) -> Rule:
    """A loss that is a plain mean or sum of its elements; `operands` are the names that broadcast together.

    mean_by_weight: where it is given weights, its mean is divided by their sum, not by the number of elements.
    """
    together = operands.split()

    def loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
        arguments = _bound(func, args, kwargs)
        tensors = {name: arguments[name] for name in together if isinstance(arguments.get(name), Tensor)}
        spec, right = align(tensors.values())
        everywhere = [value for name, value in arguments.items() if name not in tensors]
        if any(isinstance(value, BatchTensor) for value in everywhere):
            return NotImplemented
        if any(tensor.dim() != right for tensor in tensors.values() if tensor.dim()):  # the batch leads everywhere
            return NotImplemented
        if len({tensors[name].shape for name in together[:2] if name in tensors}) > 1:  # torch warns, of whole sizes
            return NotImplemented
        if len({tensor.shape[0] for tensor in tensors.values() if tensor.dim()}) > 1:  # torch does not broadcast all
            return NotImplemented
        reduction = arguments.pop("reduction")
        local = {name: localise(value, spec, right) for name, value in arguments.items()}
        each = BatchTensor(func(**local, reduction="none"), spec)
        if reduction == "batchmean":
            return whole_sum(each, None, False, None) / tensors["input"].shape[0]
        if reduction == "mean" and mean_by_weight and "weight" in tensors:
            weights = whole_sum(BatchTensor(local["weight"], spec), None, False, None)
            return whole_sum(each, None, False, None) / weights
        return _reduced(each, reduction)

    return loss


_elementwise_kl_div = row_loss("input target")


def kl_div(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """kl_div, with torch's warning that the mean over elements is not the divergence's."""
    result = _elementwise_kl_div(func, args, kwargs)
    if result is not NotImplemented and _bound(func, args, kwargs)["reduction"] == "mean":
        func(torch.zeros(1), torch.zeros(1), reduction="mean")  # the rule itself asks torch for no reduction
    return result


def sample_loss(operands: str) -> Rule:
    """A loss with one number for each sample, of which it is the mean or the sum; the batch leads each operand."""
    by_sample = operands.split()

    def loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
        arguments = _bound(func, args, kwargs)
        if not all(isinstance(arguments.get(name), Tensor) for name in by_sample):
            return NotImplemented
        if arguments.get("distance_function") is not None:  # which may compare any two rows
            return NotImplemented
        others = [value for name, value in arguments.items() if name not in by_sample and isinstance(value, Tensor)]
        if any(isinstance(value, BatchTensor) or value.dim() > 1 for value in others):
            return NotImplemented
        spec = next(arguments[name]._spec for name in by_sample if isinstance(arguments[name], BatchTensor))
        if spec.dim != 0 or arguments[by_sample[0]].dim() != 2:
            return NotImplemented
        local = {name: rows_in(arguments[name], spec, 0) for name in by_sample}
        reduction = arguments.pop("reduction")
        each = BatchTensor(func(**{**arguments, **local}, reduction="none"), spec)
        return _reduced(each, reduction)

    return loss


def _reduced(each: BatchTensor, reduction: str) -> Any:
    if reduction == "none":
        return each
    return (whole_sum if reduction == "sum" else whole_mean)(each, None, False, None)


def ctc_loss(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """ctc_loss of (T, N, C) scores and (N, S) targets; its mean is over targets, then over samples."""
    arguments = _bound(func, args, kwargs)
    scores = arguments["log_probs"]
    if not isinstance(scores, BatchTensor) or scores._spec.dim != 1 or arguments["targets"].dim() != 2:
        return NotImplemented
    spec, reduction = scores._spec.at(0), arguments.pop("reduction")
    lengths = {name: arguments[name] for name in ("input_lengths", "target_lengths")}
    lengths = {name: size if isinstance(size, Tensor) else torch.as_tensor(size) for name, size in lengths.items()}
    local = {name: rows_in(value, spec, 0) for name, value in {"targets": arguments["targets"], **lengths}.items()}
    each = func(**{**arguments, **local, "log_probs": scores._local}, reduction="none")
    if reduction == "mean":
        each = each / local["target_lengths"].clamp_min(1).to(each)
    return _reduced(BatchTensor(each, spec), reduction)


def pairwise(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """cosine_similarity and pairwise_distance of rows in dimension 0 of both operands."""
    spec, right = align(args[:2])
    if len(args) < 2:
        return NotImplemented
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 1)
    if func is F.cosine_similarity and dim % right == 0:
        return NotImplemented
    if any(side.dim() != right or side.dim() < 2 for side in args[:2]):
        return NotImplemented
    local = [localise(side, spec, right) for side in args[:2]]
    return BatchTensor(func(*local, *args[2:], **kwargs), spec)


RULES: dict[Function, Rule] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), class_loss),
    **dict.fromkeys((F.mse_loss, F.l1_loss), row_loss("input target weight", mean_by_weight=True)),
    **dict.fromkeys((F.smooth_l1_loss, F.huber_loss), row_loss("input target weight")),
    **dict.fromkeys((F.binary_cross_entropy, F.binary_cross_entropy_with_logits), row_loss("input target weight")),
    F.kl_div: kl_div,
    **dict.fromkeys((F.poisson_nll_loss, F.soft_margin_loss), row_loss("input target")),
    F.gaussian_nll_loss: row_loss("input target var"),
    F.margin_ranking_loss: row_loss("input1 input2 target"),
    F.hinge_embedding_loss: row_loss("input target"),
    F.cosine_embedding_loss: sample_loss("input1 input2 target"),
    **dict.fromkeys(
        (F.triplet_margin_loss, F.triplet_margin_with_distance_loss), sample_loss("anchor positive negative")
    ),
    **dict.fromkeys((F.multi_margin_loss, F.multilabel_margin_loss), sample_loss("input target")),
    F.multilabel_soft_margin_loss: sample_loss("input target"),
    F.ctc_loss: ctc_loss,
    **dict.fromkeys((F.cosine_similarity, F.pairwise_distance), pairwise),
}
