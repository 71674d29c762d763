"""A torch function called with batch tensors: look up its rule, or compute it whole on every rank.

The first call of its kind runs the rule, the second records what that does; where it only called torch on local
tensors, later ones run the recorded program (replay.py). Either way a result is what one device would compute,
whatever the values are: a rule keeps rows apart, meets the other ranks, or the function is computed whole. So
nothing is ever assumed of a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from duoka.errors import Refused
from duoka.private.torch import tree_leaves, tree_map_only
from duoka.view.batch import (
    BatchTensor,
    Joint,
    Rule,
    alike,
    batches_in,
    has_sparse,
    joined,
    may_write,
    of_share,
    of_the_whole,
)
from duoka.view.below import looks_below
from duoka.view.draws import Once
from duoka.view.failing import MAY_FAIL, may_fail
from duoka.view.layout import name_backward, with_order
from duoka.view.own_rows import compute_opaque
from duoka.view.parts import is_sharded
from duoka.view.replay import Described, Outdated, Recorder
from duoka.view.rules.lookup import dtype_of, ndim_of
from duoka.view.site import user_line
from duoka.view.view import View
from duoka.view.vouched import OPERATORS, names_of_operator
from duoka.view.whole import compute_whole, take_row

Function = Callable[..., Any]

_L1_LOSS = F.l1_loss
_RECORDED_AT_MOST = 3  # times
_INPUT_IS_NOT_FIRST = (torch.where, torch.searchsorted)


def dispatch(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func(*args, **kwargs)` gives on one device, of which some arguments are batch tensors."""
    if not args and "input" in kwargs and func not in _INPUT_IS_NOT_FIRST:
        args, kwargs = (kwargs["input"],), {name: kwargs[name] for name in kwargs if name != "input"}
    if looks_below() and BatchTensor.rules.get(func) not in BatchTensor.unrecorded:
        return compute_whole(func, args, kwargs)
    call = Described(func, args, kwargs)
    first = call.batches[0]
    view = first._meta.spec.view
    if len(call.batches) > 1 and any(batch._meta.spec.view is not view for batch in call.batches):
        apart = {id(batch): batch.full_tensor() for batch in call.batches if batch._meta.spec.view.of_parameters}
        if 0 < len(apart) < len({id(batch) for batch in call.batches}):
            changed = tree_map_only(BatchTensor, lambda batch: apart.get(id(batch), batch), (args, kwargs))
            return dispatch(func, *changed)
    if view.of_parameters and may_write(func, kwargs):
        view.written += 1
    if view.own.count > 1 and type(first) is not Joint:
        return _called(func, args, kwargs, call)  # one of several shares
    try:
        if func in MAY_FAIL and may_fail(func, args, call.batches):
            return view.own.ranks.agreed(
                lambda: _called(func, args, kwargs, call), lambda: compute_whole(func, args, kwargs)
            )
        return _called(func, args, kwargs, call)
    except Exception as error:
        view.raised(error)
        raise


def _called(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], call: Described) -> Any:
    first = call.batches[0]
    if type(first) is Joint:
        return _of_shares(func, args, kwargs)
    view = first._meta.spec.view
    if call.key is not None and not view.lent.copies:
        program = view.programs[call.key]
        if program is not None:
            inputs = call.inputs
            for place in call.plain:
                if inputs[place].requires_grad or view.device is not None:
                    inputs[place] = view.enter(inputs[place])
            try:
                return program(inputs, call.batches)
            except Outdated:
                pass
            except Exception as error:
                raise _in_words(error, func, args, kwargs, view) from None
    return _in_step(func, args, kwargs, view, call)


def _in_step(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], view: View, call: Described) -> Any:
    """The call, with copies that the script has of batches kept as they are."""
    first = args[0] if args else None
    if not view.lent.copies or not isinstance(first, BatchTensor):
        return _by_rule(func, args, kwargs, view, call)
    with view.lent.in_step(first._rows, args[2] if func is Tensor.__setitem__ else None):
        return _by_rule(func, args, kwargs, view, call)


def _by_rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], view: View, call: Described) -> Any:
    rule = BatchTensor.rules.get(func)
    if rule is None and isinstance(func, OPERATORS):
        return compute_opaque(names_of_operator(func), func, args, kwargs)
    if rule is None or kwargs.get("out") is not None:
        return compute_whole(func, args, kwargs)
    if func is Tensor.__getitem__ and type(args[1]) is int and args[0]._spec.dim == 0 and view.own.count == 1:
        return take_row(*args)
    leaves = tree_leaves((args, kwargs))
    if call.key is None and any(map(is_sharded, leaves)):
        raise Refused(
            f"{user_line()} computes with a parameter that is in parts: with strategy='fsdp', those of a block come "
            "together in calls of the block itself, not of its methods or parts; call the block"
        )
    try:
        out = _ruled(rule, func, *_entered(leaves, args, kwargs, view), view, call.key)
    except Exception as error:
        if has_sparse((args, kwargs)):  # rules cut what is dense
            return compute_whole(func, args, kwargs)
        raise _in_words(error, func, args, kwargs, view) from None
    if out is NotImplemented:
        return compute_whole(func, args, kwargs)
    if type(out) is Tensor and out.requires_grad:
        kind = func, tuple(kwargs), *map(_kind, leaves)
        if kind not in view.backward_names:
            view.backward_names[kind] = name_backward(out, func, args, kwargs)
        out.__dict__["backward_name"] = view.backward_names[kind]
    return out


def _entered(
    leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], view: View
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with what stands for replicated tensors among rows."""
    entered = {id(leaf): view.enter(leaf) for leaf in leaves if type(leaf) in (Tensor, nn.Parameter)}
    if all(entered.get(id(leaf), leaf) is leaf for leaf in leaves):
        return args, kwargs
    changed: Any = tree_map_only(Tensor, lambda leaf: entered.get(id(leaf), leaf), (args, kwargs))
    return changed[0], changed[1]


def _in_words(error: Exception, func: Function, args: Any, kwargs: Any, view: View) -> Exception:
    """The error with the shapes of whole batches, instead of those of some rows."""

    def again() -> None:
        whole = tree_map_only(BatchTensor, alike, (args, kwargs))
        func(*whole[0], **whole[1])

    return of_the_whole(error, view, again)


def _ruled(rule: Rule, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], view: View, key: Any) -> Any:
    """What the rule gives; recorded, where it may be, when the key comes again.

    Not at once, as lengths may come once; and not for ever, as what meets other ranks is never kept.
    """
    may_be_kept = key is not None and rule not in BatchTensor.unrecorded and not view.lent.copies
    if may_be_kept and func is not _L1_LOSS:  # which does not tell a recorder its weight
        calls = view.calls[key] or 0
        if calls <= _RECORDED_AT_MOST:
            view.calls.keep(key, calls + 1)
            if calls:
                return _recorded(rule, func, args, kwargs, view)
    return with_order(rule(func, args, kwargs), func, args, kwargs)


def _kind(value: Any) -> Any:
    """What of an argument may decide by which function torch goes back."""
    if isinstance(value, Tensor):
        return dtype_of(value), ndim_of(value)
    return value if isinstance(value, (str, bool)) else type(value)


def _recorded(rule: Rule, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], view: View) -> Any:
    """What the rule gives; if it can be replayed, there is a program for calls of this key from now on."""
    args, kwargs = _with_floats_of_their_own((args, kwargs))
    call = Described(func, args, kwargs)
    met = view.met
    recorder = Recorder(call.inputs)
    before, view.own.recorder = view.own.recorder, recorder
    recorder.start()
    try:
        out = rule(func, args, kwargs)
    finally:
        recorder.stop()
        view.own.recorder = before
    out = with_order(out, func, args, kwargs)
    if out is not NotImplemented and call.key is not None and view.met == met:
        program = recorder.program(out, call.batches)
        if program is not None:
            view.programs.keep(call.key, program)
    return out


def _with_floats_of_their_own(value: Any) -> Any:
    """The same with a new object for each float: a recorder tells them by their identity."""
    kind = type(value)
    if kind is float or kind is complex:
        return value * 1.0
    if kind is tuple or kind is list:
        return kind(map(_with_floats_of_their_own, value))
    if kind is dict:
        return {name: _with_floats_of_their_own(one) for name, one in value.items()}
    return value


def _of_shares(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call for each of several own shares, which wait for each other where they meet."""
    rule = BatchTensor.rules.get(func)
    if rule in BatchTensor.together:
        return rule(func, args, kwargs)
    found = [batch for batch in batches_in((args, kwargs)) if isinstance(batch, Joint)]
    own = found[0]._meta.spec.view.own
    shares = [of_share((args, kwargs), place) for place in range(own.count)]
    draws = rule in BatchTensor.drawing
    own.once = Once() if draws else None
    try:
        return joined(own.each(lambda place: dispatch(func, *shares[place]), draws=draws), found)
    finally:
        own.once = None
