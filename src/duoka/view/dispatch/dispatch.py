"""Call a torch function with batch tensors: by its rule, or whole on every rank.

The first call with a key (function, shapes, types, placements) runs the rule, and the second records the torch calls
that the rule makes. If these are all that it does, later calls with the key run the recorded program (`replay.py`).
In every case the result is that of one device, whatever the values are: a rule computes each row by itself or calls
a collective, and a function without a rule is computed whole. Nothing is assumed about a module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.private.torch import tree_leaves, tree_map_only
from duoka.view.dispatch.cached import index_cached
from duoka.view.dispatch.failing import RAISES_FOR_ROWS, WRITES_ROWS, check_indices, may_fail, note_success
from duoka.view.dispatch.moving import asked_device, on_host, reads_beside, staying
from duoka.view.dispatch.own_rows import compute_opaque
from duoka.view.dispatch.replay import DescribedCall, Recorder
from duoka.view.dispatch.whole import compute_whole, take_row
from duoka.view.random.draws import DrawCache
from duoka.view.row_independent import OPERATORS, names_of_operator
from duoka.view.rules.lookup import NotByRows
from duoka.view.shares.local import Outdated
from duoka.view.support.transforms import operators_are_observed
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Function,
    Kwargs,
    MultiShareBatch,
    Rule,
    batches_in,
    call_each_share,
    has_sparse,
    join_results,
    may_write,
    of_share,
    whole_batch_error,
    whole_like,
)
from duoka.view.tensor.outcome import RAISES, BackwardName, Outcome, conform, outcome_of
from duoka.view.view import View

_L1_LOSS = F.l1_loss
_GETITEM, _SETITEM = Tensor.__getitem__, Tensor.__setitem__
_RECORDED_AT_MOST = 3  # times
_INPUT_IS_NOT_FIRST = (torch.where, torch.searchsorted)


def dispatch(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return what `func(*args, **kwargs)`, with batch tensors among the arguments, returns on one device."""
    if not args and "input" in kwargs and func not in _INPUT_IS_NOT_FIRST:
        args, kwargs = (kwargs["input"],), {name: kwargs[name] for name in kwargs if name != "input"}
    if func not in BatchTensor.rules:
        func = BatchTensor.known(func)
    if func is _GETITEM or func is _SETITEM:
        out = index_cached(*args)
        if out is not NotImplemented:
            return out
    if operators_are_observed() and not BatchTensor.traits_of(func).unrecorded:
        return compute_whole(func, args, kwargs)
    call = DescribedCall(func, args, kwargs)
    first = call.batches[0]
    view = first._meta.spec.view
    gathered = _gather_parameters(call, args, kwargs) if view.has_sharded or view.of_parameters else None
    if gathered is not None:
        args, kwargs = gathered
        return dispatch(func, args, kwargs) if batches_in(gathered) else func(*args, **kwargs)
    if view.of_parameters:
        view.written += may_write(func, kwargs)
        if view.device is not None:
            return _with_rows_on_host(func, args, kwargs, call, view)
    if view.shares.several and type(first) is not MultiShareBatch:
        return _replay_or_run(func, args, kwargs, call)  # one of several shares
    return _run_as_all_ranks(func, args, kwargs, call, view)


def _with_rows_on_host(func: Function, args: Args, kwargs: Kwargs, call: DescribedCall, view: View) -> Any:
    """Make a call with offloaded rows: they stay, and the result's device is that which the script sees of them."""
    assert view.device is not None
    asked, shown = asked_device(func, args, kwargs), call.batches[0]._shown_device
    if asked not in (None, view.device):
        func, args, kwargs = staying(func, args, kwargs, view.device)
        call, shown = DescribedCall(func, args, kwargs), asked
    elif asked is not None and view.computes_on not in (None, asked):
        return on_host(_replay_or_run(func, args, kwargs, call))
    if view.computes_on is not None and reads_beside(view.computes_on, func, args, kwargs):
        with view.gathering_on(view.computes_on):
            return compute_whole(func, args, kwargs)
    out = _run_as_all_ranks(func, args, kwargs, call, view)
    for batch in batches_in(out):
        batch._shown_device = shown
    return out


def _run_as_all_ranks(func: Function, args: Args, kwargs: Kwargs, call: DescribedCall, view: View) -> Any:
    """Make a call by its rule on all ranks, or whole on all if it fails for the rows of one."""
    try:
        if func in RAISES_FOR_ROWS and may_fail(func, args, call.batches, kwargs):
            agreed = view.shares.processes.run_or_fall_back
            if func not in WRITES_ROWS:
                out = agreed(
                    lambda: _replay_or_run(func, args, kwargs, call), lambda: compute_whole(func, args, kwargs)
                )
                note_success(func, args)
                return out
            if not agreed(lambda: check_indices(func, args, kwargs), lambda: False):
                return compute_whole(func, args, kwargs)
        return _replay_or_run(func, args, kwargs, call)
    except Exception as error:
        view.raised(error)
        raise


def _gather_parameters(call: DescribedCall, args: Args, kwargs: Kwargs) -> Any:
    """Return the arguments with sharded parameters gathered where they stand beside batches; else None."""
    if len({id(batch._meta.spec.view) for batch in call.batches}) == 1:
        return None
    gathered = {
        id(batch): batch.full_tensor().to(batch._meta.spec.view.computes_on or batch.device)
        for batch in call.batches
        if batch._meta.spec.view.of_parameters
    }
    if not 0 < len(gathered) < len({id(batch) for batch in call.batches}):
        return None
    return tree_map_only(BatchTensor, lambda batch: gathered.get(id(batch), batch), (args, kwargs))


def _replay_or_run(func: Function, args: Args, kwargs: Kwargs, call: DescribedCall) -> Any:
    """Run the program recorded for the call's key; else its rule."""
    first = call.batches[0]
    if type(first) is MultiShareBatch:
        return _call_each_share(func, args, kwargs, call)
    view = first._meta.spec.view
    aliased = view.aliased
    if call.key is not None and not (aliased.copies and (aliased.is_active or may_write(func, kwargs))):
        program = view.programs[call.key]
        if program is not None:
            inputs = call.inputs
            for index in call.plain:
                if inputs[index].requires_grad or view.device is not None:
                    inputs[index] = view.replicate(inputs[index])
            try:
                out = program(inputs, call.batches)
                count_write(func, kwargs, call.batches)
                BatchTensor.keep(func, args, kwargs, call.key, program)
                return out
            except Outdated:
                pass
            except Exception as error:
                raise _with_global_shapes(error, func, args, kwargs, view) from None
    return _run_and_refresh_copies(func, args, kwargs, view, call)


def _run_and_refresh_copies(func: Function, args: Args, kwargs: Kwargs, view: View, call: DescribedCall) -> Any:
    """Run the rule, and update the gathered copies that the script holds of batches that the rule writes to.

    A write to a batch beside an array or a row of it is computed whole, as both are of the same memory there.
    """
    if not view.aliased.copies:
        out = _rule_or_whole(func, args, kwargs, view, call)
        count_write(func, kwargs, call.batches)
        return out
    rows = [batch._rows for batch in call.batches]
    with view.aliased.updated(rows, args[2] if func is _SETITEM else None):
        plain = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor]
        if may_write(func, kwargs) and view.aliased.share_memory(rows, plain):
            out = compute_whole(func, args, kwargs)
        else:
            out = _rule_or_whole(func, args, kwargs, view, call)
        count_write(func, kwargs, call.batches)
        return out


def replay_failed(error: Exception, func: Function, args: Args, kwargs: Kwargs, view: View) -> None:
    """Raise what one device raises, in place of an error of a program that the engine in C has run."""
    told = _with_global_shapes(error, func, args, kwargs, view)
    view.raised(told)
    raise told from None


def replicate(view: View, tensor: Tensor) -> Tensor:
    """Return what `View.replicate` returns, for the engine in C."""
    try:
        return view.replicate(tensor)
    except Exception as error:
        view.raised(error)
        raise


def count_write(func: Function, kwargs: Kwargs, batches: list[BatchTensor]) -> None:
    """Count a write in inference mode, whose tensors do not count it."""
    if torch.is_inference_mode_enabled() and may_write(func, kwargs):
        for share in (share for batch in batches for share in batch._shares):
            share._meta.spec.view.aliased.count_write(share._rows)


def _rule_or_whole(func: Function, args: Args, kwargs: Kwargs, view: View, call: DescribedCall) -> Any:
    """Run the rule of a function; compute it whole if it has none, or if the rule returns NotImplemented."""
    rule = BatchTensor.rules.get(func)
    if rule is None and isinstance(func, OPERATORS):
        return compute_opaque(names_of_operator(func), func, args, kwargs)
    traits = BatchTensor.traits_of(func)
    multiplies = view.of_parameters and traits.computes  # in 16 bits, as some optimizers do
    if rule is None or multiplies or kwargs.get("out") is not None:
        return compute_whole(func, args, kwargs)
    if func is _GETITEM and type(args[1]) is int and args[0]._spec.dim == 0 and not view.shares.several:
        return take_row(*args)
    try:
        # A gradient is asked of a tensor itself.
        operands = (args, kwargs) if traits.once_for_all_shares else _replicated(call, args, kwargs, view)
        out = _run_and_maybe_record(rule, func, *operands, view, call.key)
    except Exception as error:
        if has_sparse((args, kwargs)):  # rules split dense tensors
            return compute_whole(func, args, kwargs)
        raise _with_global_shapes(error, func, args, kwargs, view) from None
    return compute_whole(func, args, kwargs) if out is NotImplemented else out


def _replicated(call: DescribedCall, args: Args, kwargs: Kwargs, view: View) -> tuple[Args, Kwargs]:
    """Replace replicated tensors among the arguments by what `View.replicate` returns for them."""
    values = tree_leaves((args, kwargs)) if call.key is None else [call.inputs[index] for index in call.plain]
    tensors = [value for value in values if isinstance(value, Tensor) and not isinstance(value, BatchTensor)]
    replaced = {id(tensor): view.replicate(tensor) for tensor in tensors}
    if all(replaced[id(tensor)] is tensor for tensor in tensors):
        return args, kwargs
    changed: Any = tree_map_only(Tensor, lambda leaf: replaced.get(id(leaf), leaf), (args, kwargs))
    return changed[0], changed[1]


def _with_global_shapes(error: Exception, func: Function, args: Any, kwargs: Any, view: View) -> Exception:
    """Return the error with the shapes of global batches instead of those of local rows."""

    def again() -> None:
        plain = tree_map_only(BatchTensor, whole_like, (args, kwargs))
        func(*plain[0], **plain[1])

    return whole_batch_error(error, view, again)


def _run_and_maybe_record(rule: Rule, func: Function, args: Args, kwargs: Kwargs, view: View, key: Any) -> Any:
    """Run a rule; record it from the second call of a key on, a few times at most.

    Not in the first call, as sequences of some length may come only once; and not again and again, as a rule that
    calls a collective never becomes a program.
    """
    may_be_kept = key is not None and not BatchTensor.traits_of(func).unrecorded and not view.aliased.is_active
    if may_be_kept and func is not _L1_LOSS:  # its `weight` bypasses the recorder
        calls = view.calls[key] or 0
        if calls <= _RECORDED_AT_MOST:
            view.calls.keep(key, calls + 1)
            if calls:
                return _record(rule, func, args, kwargs, view)
    return _conforming(rule, func, args, kwargs, view, key, None)


def _conforming(rule: Rule, func: Function, args: Args, kwargs: Kwargs, view: View, key: Any, recorder: Any) -> Any:
    """Run a rule, and give its results the strides and the memory that they have on one device (`outcome.py`)."""

    def outcome() -> Outcome:
        known = view.outcomes[key] if key is not None else None
        if known is None:
            known = outcome_of(func, args, kwargs)
            if key is not None:
                view.outcomes.keep(key, known)
        return known

    views = BatchTensor.traits_of(func).views
    if views and outcome() is RAISES:
        return NotImplemented  # computed whole, it raises torch's error
    if recorder is not None:
        recorder.start()
    try:
        out = rule(func, args, kwargs)
    except NotByRows:
        return NotImplemented
    if type(out) is Tensor and (out.requires_grad or (recorder is not None and out.is_floating_point())):
        out = _with_backward_name(out, func, args, kwargs, view, recorder)
    return conform(out, batches_in((args, kwargs)), outcome, views)


def _with_backward_name(out: Tensor, func: Function, args: Args, kwargs: Kwargs, view: View, recorder: Any) -> Tensor:
    """Note the name of a result's backward function, here and in the program that is being recorded."""
    name, names = BackwardName(func, args, kwargs), view.shares.backward_names

    def named(out: Tensor) -> Tensor:
        if out.requires_grad:
            names[out] = name
        return out

    return named(out) if recorder is None else recorder.calling(named, out)


def _record(rule: Rule, func: Function, args: Args, kwargs: Kwargs, view: View) -> Any:
    """Run a rule and record it; keep the program if there is one."""
    args, kwargs = _with_distinct_floats((args, kwargs))
    call = DescribedCall(func, args, kwargs)
    recorder = Recorder(call.inputs, lambda: view.interactions)
    before, view.shares.recorder = view.shares.recorder, recorder
    try:
        out = _conforming(rule, func, args, kwargs, view, call.key, recorder)
    finally:
        recorder.stop()
        view.shares.recorder = before
    if out is not NotImplemented and call.key is not None:
        program = recorder.program(out, call.batches)
        if program is not None:
            view.programs.keep(call.key, program)
    return out


def _with_distinct_floats(value: Any) -> Any:
    """Copy nested arguments with a new object for each float and complex number.

    The recorder distinguishes these by identity.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return value * 1.0
    if kind is tuple or kind is list:
        return kind(map(_with_distinct_floats, value))
    if kind is dict:
        return {name: _with_distinct_floats(item) for name, item in value.items()}
    return value


def _call_each_share(func: Function, args: Args, kwargs: Kwargs, call: DescribedCall) -> Any:
    """Make the call for each local share."""
    traits, shares = BatchTensor.traits_of(func), call.batches[0]._meta.spec.view.shares
    if traits.once_for_all_shares:
        return BatchTensor.rules[func](func, args, kwargs)
    draws = traits.draws
    if not draws and (out := _replay_each_share(func, args, kwargs, call)) is not NotImplemented:
        return out
    shares.draw_cache = DrawCache() if draws else None
    try:
        return call_each_share(partial(dispatch, func), args, kwargs, draws)
    finally:
        shares.draw_cache = None


def _replay_each_share(func: Function, args: Args, kwargs: Kwargs, call: DescribedCall) -> Any:
    """Run the programs recorded for the call in each local share: no share waits for others, so none is suspended.

    Return NotImplemented if a share has no program, or may need the others.
    """
    first = call.batches[0]._meta.spec.view
    programs = _programs_of_shares(func, args, kwargs, call.key, first)
    plain = [call.inputs[index] for index in call.plain if call.inputs[index].requires_grad]
    if programs is None or first.aliased.copies or not all(tensor.is_leaf for tensor in plain):
        return NotImplemented
    outs = []
    try:
        for index, (program, view) in enumerate(zip(programs, first.siblings, strict=True)):
            inputs = [of._by_share[index]._rows if type(of) is MultiShareBatch else of for of in call.inputs]
            for at in call.plain if plain else ():
                inputs[at] = view.replicate(inputs[at])
            batches = [batch._by_share[index] for batch in call.batches]  # type: ignore[attr-defined]
            outs.append(program(inputs, batches))
            count_write(func, kwargs, batches)
    except Outdated:
        return NotImplemented
    except Exception as error:
        raise _with_global_shapes(error, func, args, kwargs, first) from None
    return join_results(outs, call.batches)  # type: ignore[arg-type]


def _programs_of_shares(func: Function, args: Any, kwargs: Any, key: Any, first: View) -> Any:
    """Return the program of each local share for a call with this key; None if one has none."""
    shares = first.shares
    programs = shares.programs[key] if key is not None else None
    if programs is None and key is not None and (calls := shares.calls[key] or 0) <= 2 * _RECORDED_AT_MOST:
        shares.calls.keep(key, calls + 1)
        keys = [DescribedCall(func, *of_share((args, kwargs), index)).key for index in range(shares.count)]
        recorded = [view.programs[key] for view, key in zip(first.siblings, keys, strict=True) if key is not None]
        if len(recorded) == len(keys) and None not in recorded:
            shares.programs.keep(key, programs := recorded)
    return programs
