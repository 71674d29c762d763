"""Call a torch function with batch tensors: by its rule, or whole on every rank.

The first call with a key (function, shapes, types, placements) runs the rule, and the second records the torch calls
that the rule makes. If these are all that it does, later calls with the key run the recorded program (`replay.py`).
In every case the result is that of one device, whatever the values are: a rule computes each row by itself or calls
a collective, and a function without a rule is computed whole. Nothing is assumed about a module.

Rows of offloaded parameters stay in the host's memory, whatever device a call asks for (`_with_rows_on_host`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from duoka.errors import DuokaError
from duoka.private.torch import tree_leaves, tree_map_only
from duoka.view.dispatch.failing import RAISES_FOR_ROWS, WRITES_ROWS, check_values, may_fail, note_success
from duoka.view.dispatch.offloaded import asked_device, on_host, reads_beside, staying
from duoka.view.dispatch.overlapping import apart, compute_in, overlapping_operands, writes_beside
from duoka.view.dispatch.own_rows import OPERATORS, compute_opaque, names_of_operator
from duoka.view.dispatch.replay import DescribedCall, Recorder
from duoka.view.generators import keep_states
from duoka.view.memory import history, version
from duoka.view.rules.draws import DrawCache
from duoka.view.rules.facts import memory_of_batch
from duoka.view.rules.lookup import NotByRows
from duoka.view.rules.pointwise import CONVERSIONS
from duoka.view.shares.local import Outdated
from duoka.view.shares.strides import contiguous_strides
from duoka.view.tensor.batch import (
    SET_DATA,
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
from duoka.view.tensor.outcome import RAISES, BackwardName, Outcome, conform, outcome_of, saves_copies_of
from duoka.view.transforms import operators_are_observed
from duoka.view.view import ParameterView
from duoka.view.whole import compute_whole, index_cached, take_row

_L1_LOSS = F.l1_loss
_PASSES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)  # parameters are inputs: leaves
_GETITEM, _SETITEM = Tensor.__getitem__, Tensor.__setitem__
_RECORDED_AT_MOST = 3  # times
_INPUT_IS_NOT_FIRST = (torch.where, torch.searchsorted)


def dispatch(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Return what `func(*args, **kwargs)`, with batch tensors among the arguments, returns on one device."""
    # Rules take the batch as the first argument, which torch's functions accept by name, too.
    if not args and "input" in kwargs and func not in _INPUT_IS_NOT_FIRST:
        args, kwargs = (kwargs["input"],), {name: kwargs[name] for name in kwargs if name != "input"}
    if func not in BatchTensor.rules:
        func = BatchTensor.known(func)
    # A script's loop over rows makes thousands of these calls, so they come before all else.
    if func is _GETITEM or func is _SETITEM:
        out = index_cached(*args)
        if out is not NotImplemented:
            return out
    if func in CONVERSIONS and not isinstance(args[0], BatchTensor):  # it only reads the type and device of a batch
        read = tree_map_only(BatchTensor, lambda of: torch.empty(0, dtype=of.dtype, device=of.device), (args, kwargs))
        return func(*read[0], **read[1])
    # What counts or records operators (FlopCounterMode) must see those of one device.
    if operators_are_observed() and not BatchTensor.traits_of(func).unrecorded:
        return compute_whole(func, args, kwargs)
    call = DescribedCall(func, args, kwargs)
    view = call.view
    # Rows of a parameter and rows of a batch are divided differently: no rule has both.
    gathered = _gather_parameters(call) if view.has_sharded or view.of_parameters else None
    if gathered is not None:
        return _beside_batches(call, gathered)
    if view.of_parameters:
        view.written += call.may_write()  # whole parameters that were gathered before are out of date
        return _beside_views(call) if view.viewed else _with_shards(call)
    if view.shares.several and type(call.batches[0]) is not MultiShareBatch:
        return _replay_or_run(call)  # one of several shares
    return _run_as_all_ranks(call)


def _compute_whole(call: DescribedCall) -> Any:
    """Compute a call whole."""
    return compute_whole(call.func, call.args, call.kwargs)


def _with_shards(call: DescribedCall) -> Any:
    """Make a call with sharded parameters, or with what is computed from them."""
    return _run_as_all_ranks(call) if call.view.device is None else _with_rows_on_host(call, call.view.device)


def _beside_views(call: DescribedCall) -> Any:
    """Make a call with sharded parameters while the script may hold views of some (sharding/views.py)."""
    view = call.view
    assert isinstance(view, ParameterView)
    view.write_back_views()
    out = _with_shards(call)
    if call.may_write():
        view.update_views([batch._rows for batch in call.batches])
    return out


def _with_rows_on_host(call: DescribedCall, host: torch.device) -> Any:
    """Make a call with offloaded rows: they stay, and the result's device is that which the script sees of them."""
    parts, view, shown = (call.func, call.args, call.kwargs), call.view, call.batches[0]._shown_device
    asked = asked_device(*parts)
    if asked not in (None, host):
        call, shown = DescribedCall(*staying(*parts, host)), asked
    elif asked is not None and view.computes_on not in (None, asked):
        return on_host(_replay_or_run(call))
    beside = view.computes_on is not None and reads_beside(view.computes_on, call.func, call.args, call.kwargs)
    with view.gathering_on(view.computes_on if beside else view.gathers_on):
        out = _compute_whole(call) if beside else _run_as_all_ranks(call)

    def shown_as(leaf: Tensor) -> Tensor:
        if isinstance(leaf, BatchTensor):
            leaf._shown_device = shown
        return leaf if shown is None or isinstance(leaf, BatchTensor) else leaf.to(shown)

    return tree_map_only(Tensor, shown_as, out)


def _run_as_all_ranks(call: DescribedCall) -> Any:
    """Make a call by its rule on all ranks, or whole on all if it fails for the rows of one."""
    try:
        if _draws_on_cpu(call):
            return _draw_as_all_ranks(call)
        # A label out of range is in the rows of one rank. On one device the call raises; so all ranks must raise.
        if call.func in RAISES_FOR_ROWS and may_fail(call.func, call.args, call.batches, call.kwargs):
            agreed = call.view.shares.processes.run_or_fall_back
            if call.func not in WRITES_ROWS:
                out = agreed(lambda: _replay_or_run(call), lambda: _compute_whole(call))
                note_success(call.func, call.args)
                return out
            if not agreed(lambda: check_values(call.func, call.args, call.kwargs), lambda: False):
                return _compute_whole(call)
        return _replay_or_run(call)
    except Exception as error:
        call.view.raised(error)
        raise


def _draws_on_cpu(call: DescribedCall) -> bool:
    return call.traits.draws and call.batches[0].device.type == "cpu"


def _draw_as_all_ranks(call: DescribedCall) -> Any:
    """Make a call that draws random numbers; if it raises an error, compute it whole, from the same state.

    So it has drawn and written what it has on one device, if the script catches the error.
    """
    restore = keep_states([leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Generator)])

    def whole() -> Any:
        restore()
        return _compute_whole(call)

    if call.func in RAISES_FOR_ROWS and may_fail(call.func, call.args, call.batches, call.kwargs):
        return call.view.shares.processes.run_or_fall_back(lambda: _replay_or_run(call), whole)
    try:
        return _replay_or_run(call)
    except (DuokaError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError):  # of types or shapes, so on every rank
        return whole()


def _gather_parameters(call: DescribedCall) -> dict[int, tuple[BatchTensor, Tensor]] | None:
    """Return sharded parameters that stand beside batches and the same gathered, by identity; None if none do."""
    if call.func in _PASSES or len({id(batch._meta.spec.view) for batch in call.batches}) == 1:
        return None
    gathered = {
        id(batch): (batch, batch.full_tensor().to(batch._meta.spec.view.computes_on or batch.device))
        for batch in call.batches
        if batch._meta.spec.view.of_parameters
    }
    return gathered if 0 < len(gathered) < len({id(batch) for batch in call.batches}) else None


def _beside_batches(call: DescribedCall, gathered: dict[int, tuple[BatchTensor, Tensor]]) -> Any:
    """Make a call with gathered parameters, and copy what it writes to them into the shards."""
    before = [(version(full), history(full)) for _, full in gathered.values()]
    parts = (call.func, call.args, call.kwargs)
    func, args, kwargs = tree_map_only(
        BatchTensor, lambda batch: gathered[id(batch)][1] if id(batch) in gathered else batch, parts
    )
    out = dispatch(func, args, kwargs) if batches_in((args, kwargs)) else func(*args, **kwargs)
    for (batch, full), (number, recorded) in zip(gathered.values(), before, strict=True):
        if isinstance(full, BatchTensor) or version(full) != number:
            with torch.set_grad_enabled(history(full) is not recorded):
                batch.copy_(full.full_tensor() if isinstance(full, BatchTensor) else full)
    written = {id(full): batch for batch, full in gathered.values()}
    return tree_map_only(Tensor, lambda leaf: written.get(id(leaf), leaf), out)


def _replay_or_run(call: DescribedCall) -> Any:
    """Run the program recorded for the call's key; else its rule."""
    if type(call.batches[0]) is MultiShareBatch:
        return _call_each_share(call)
    view = call.view
    aliased = view.aliased
    beside = writes_beside(call)
    may_replay = call.key is not None and not (beside and overlapping_operands(call))
    # A program knows nothing of rows that the script holds: these are written back before, and gathered again after.
    if may_replay and not (aliased.copies and (aliased.is_active or call.may_write())):
        program = view.programs[call.key]
        if program is not None:
            inputs = call.inputs
            for index in call.plain:
                if inputs[index].requires_grad or view.device is not None:
                    inputs[index] = view.replicate(inputs[index])
            try:
                out = program(inputs, call.batches)
                count_write(call.func, call.kwargs, call.batches)
                if not beside:  # else it depends on their memory, which is no part of the key
                    BatchTensor.keep(call.func, call.args, call.kwargs, call.key, program)
                return out
            except Outdated:  # recorded under other circumstances (autocast): the rule decides anew
                pass
            except Exception as error:
                raise with_global_shapes(error, call) from None
    return _run_and_refresh_copies(call)


def _run_and_refresh_copies(call: DescribedCall) -> Any:
    """Run the rule, and update the gathered copies that the script holds of batches that the rule writes to.

    A write to a batch beside an array or a row of it is computed whole, as both are of the same memory there.
    """
    aliased = call.view.aliased
    if not aliased.copies:
        out = _rule_or_whole(call)
        count_write(call.func, call.kwargs, call.batches)
        return out
    rows = [batch._rows for batch in call.batches]
    with aliased.updated(rows, _put_back(call)):
        plain = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if type(leaf) is Tensor]
        beside = call.may_write() and call.func != SET_DATA and aliased.share_memory(rows, plain)
        out = _compute_whole(call) if beside else _rule_or_whole(call)
        count_write(call.func, call.kwargs, call.batches)
        return out


def _put_back(call: DescribedCall) -> Any:
    return call.args[2] if call.func is _SETITEM else None


def count_write(func: Function, kwargs: Kwargs, batches: list[BatchTensor]) -> None:
    """Count a write in inference mode, whose tensors do not count it."""
    if torch.is_inference_mode_enabled() and may_write(func, kwargs):
        for share in (share for batch in batches for share in batch._shares):
            share._meta.spec.view.aliased.count_write(share._rows)


def _rule_or_whole(call: DescribedCall) -> Any:
    """Run the rule of a function; compute it whole if it has none, or if the rule returns NotImplemented."""
    func, args, view = call.func, call.args, call.view
    rule = BatchTensor.rules.get(func)
    if rule is None and isinstance(func, OPERATORS):
        return compute_opaque(names_of_operator(func), func, args, call.kwargs)
    multiplies = view.of_parameters and call.traits.computes  # in 16 bits, as some optimizers do
    if rule is None or multiplies or call.kwargs.get("out") is not None:
        return _compute_whole(call)
    overlapping = overlapping_operands(call) if writes_beside(call) else []
    if overlapping and not (torch.is_grad_enabled() and any(batch.requires_grad for batch in call.batches)):
        memory = memory_of_batch(call.batches[0])
        if memory is not None:
            return compute_in(memory, call)
    # One row of the batch is on one rank: the rule could only return NotImplemented.
    if func is _GETITEM and type(args[1]) is int and args[0]._spec.dim == 0 and not view.shares.several:
        return take_row(*args)
    try:
        if overlapping:
            with apart(overlapping, call) as parted:
                out = _conforming(rule, _replicated(parted), None)
        else:  # a gradient is asked of a tensor itself
            out = _run_and_maybe_record(rule, call if call.traits.once_for_all_shares else _replicated(call))
    except Exception as error:
        if has_sparse((args, call.kwargs)):  # rules split dense tensors
            return _compute_whole(call)
        if _draws_on_cpu(call) or call.func in _PASSES:
            raise  # computed whole, the call raises the error of one device; a pass raises that of a hook
        raise with_global_shapes(error, call) from None
    return _compute_whole(call) if out is NotImplemented else out


def _replicated(call: DescribedCall) -> DescribedCall:
    """Replace replicated tensors among the arguments by what `View.replicate` returns for them."""
    arguments = call.args, call.kwargs
    values = tree_leaves(arguments) if call.key is None else [call.inputs[index] for index in call.plain]
    tensors = [value for value in values if isinstance(value, Tensor) and not isinstance(value, BatchTensor)]
    replaced = {id(tensor): call.view.replicate(tensor) for tensor in tensors}
    if all(replaced[id(tensor)] is tensor for tensor in tensors):
        return call
    return DescribedCall(call.func, *tree_map_only(Tensor, lambda leaf: replaced.get(id(leaf), leaf), arguments))


def with_global_shapes(error: Exception, call: DescribedCall) -> Exception:
    """Return the error with the shapes of global batches instead of those of local rows."""

    def copy(tensor: Tensor) -> Tensor:
        if isinstance(tensor, BatchTensor):
            return whole_like(tensor)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)  # which the call may write to

    def again() -> None:
        args, kwargs = tree_map_only(Tensor, copy, (call.args, call.kwargs))
        call.func(*args, **kwargs)

    return whole_batch_error(error, call.view, again)


def _run_and_maybe_record(rule: Rule, call: DescribedCall) -> Any:
    """Run a rule; record it from the second call of a key on, a few times at most.

    Not in the first call, as sequences of some length may come only once; and not again and again, as a rule that
    calls a collective never becomes a program.
    """
    view, key = call.view, call.key
    may_be_kept = key is not None and not call.traits.unrecorded and not view.aliased.is_active
    if may_be_kept and call.func is not _L1_LOSS:  # its `weight` bypasses the recorder
        calls = view.calls[key] or 0
        if calls <= _RECORDED_AT_MOST:
            view.calls.keep(key, calls + 1)
            if calls:
                return _record(rule, call)
    return _conforming(rule, call, None)


def _conforming(rule: Rule, call: DescribedCall, recorder: Any) -> Any:
    """Run a rule, and give its results the strides and the memory that they have on one device (`outcome.py`)."""
    func, args, kwargs, key, outcomes = call.func, call.args, call.kwargs, call.key, call.view.outcomes

    def outcome() -> Outcome:
        known = outcomes[key] if key is not None else None
        if known is None:
            known = outcome_of(func, args, kwargs)
            if key is not None and known.lasts:
                outcomes.keep(key, known)
        return known

    views = call.traits.views
    if views and outcome() is RAISES:
        return NotImplemented  # computed whole, it raises torch's error
    unsaved = _unsaved(call)
    if recorder is not None:
        recorder.start()
    try:
        out = rule(func, *(_with_copies(call, unsaved) if unsaved else (args, kwargs)))
    except NotByRows:
        return NotImplemented
    if type(out) is Tensor or isinstance(out, tuple):
        out = _with_backward_name(out, call, recorder)
    return conform(out, batches_in((args, kwargs)), outcome, views)


def _unsaved(call: DescribedCall) -> set[int]:
    """Return the identities of batches that autograd might save themselves on a rank with a single row only.

    One device saves copies of them, or nothing. After a later write to such a batch, the backward pass would raise an
    error on this rank alone.
    """
    if not call.traits.computes or call.may_write() or call.view.of_parameters:
        return set()
    if all(batch._spec.determines_strides for batch in call.batches):
        return set()
    batches, outcomes, key = [*batches_in((call.args, call.kwargs))], call.view.outcomes, (saves_copies_of, call.key)
    places: tuple[int, ...] | None = outcomes[key] if call.key is not None else None
    if places is None:  # torch's "meta" computes in Python, an LSTM in many steps
        unsaved = {id(batch) for batch in saves_copies_of(call.func, call.args, call.kwargs)}
        places = tuple(place for place, batch in enumerate(batches) if id(batch) in unsaved)
        if call.key is not None:
            outcomes.keep(key, places)
    return {id(batches[place]) for place in places}


def _with_copies(call: DescribedCall, copies: set[int]) -> tuple[Args, Kwargs]:
    """Return the arguments of a call with copies of these batches, given by identity."""

    def copied(batch: BatchTensor) -> BatchTensor:
        if id(batch) not in copies:
            return batch
        rows = batch._local.clone(memory_format=torch.contiguous_format)
        return BatchTensor(rows, batch._spec, contiguous_strides(batch.shape))

    return tree_map_only(BatchTensor, copied, (call.args, call.kwargs))  # type: ignore[no-any-return]


def _with_backward_name(out: Any, call: DescribedCall, recorder: Any) -> Any:
    """Note the name of the backward function of results, here and in the program that is being recorded."""
    is_recorded = recorder is not None
    plain = [leaf for leaf in ((out,) if type(out) is Tensor else out) if type(leaf) is Tensor]
    if not any(leaf.requires_grad or (is_recorded and leaf.is_floating_point()) for leaf in plain):
        return out
    note = BackwardName(call.func, call.args, call.kwargs).note
    if not is_recorded:
        for leaf in plain:
            note(leaf)
        return out
    return tree_map_only(Tensor, lambda leaf: recorder.calling(note, leaf) if type(leaf) is Tensor else leaf, out)


def _record(rule: Rule, call: DescribedCall) -> Any:
    """Run a rule and record it; keep the program if there is one."""
    # `x.clamp(0.5, 0.5)`: were both one object, the recorder could not tell which of them a call takes.
    call = DescribedCall(call.func, *_with_distinct_floats((call.args, call.kwargs)))
    view = call.view
    recorder = Recorder(call.inputs, lambda: view.interactions)
    before, view.shares.recorder = view.shares.recorder, recorder
    try:
        out = _conforming(rule, call, recorder)
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


def _call_each_share(call: DescribedCall) -> Any:
    """Make the call for each local share."""
    func, args, kwargs, traits, shares = call.func, call.args, call.kwargs, call.traits, call.view.shares
    if traits.once_for_all_shares and kwargs.get("out") is None:
        out = BatchTensor.rules[func](func, args, kwargs)
        if out is not NotImplemented:
            return out
    if not traits.draws and (out := _replay_each_share(call)) is not NotImplemented:
        return out
    # Before a share computes, as one that raises an error ends the others.
    if call.view.aliased.copies:
        rows = [[batch._shares[index]._rows for batch in call.batches] for index in range(shares.count)]
        shares.each(lambda index: call.view.siblings[index].aliased.write_back_before(rows[index], _put_back(call)))
    # The first share draws for the whole batch; the others take their rows of the same numbers.
    shares.draw_cache = DrawCache() if traits.draws else None
    try:
        return call_each_share(partial(dispatch, func), args, kwargs, traits.draws)
    finally:
        shares.draw_cache = None


def _replay_each_share(call: DescribedCall) -> Any:
    """Run the programs recorded for the call in each local share: no share waits for others, so none is suspended.

    Return NotImplemented if a share has no program, or may need the others.
    """
    first = call.view
    programs = _programs_of_shares(call)
    plain = [call.inputs[index] for index in call.plain if call.inputs[index].requires_grad]
    if programs is None or first.aliased.copies or not all(tensor.is_leaf for tensor in plain):
        return NotImplemented
    if writes_beside(call) and overlapping_operands(call):
        return NotImplemented
    outs, failed = [], None
    for index, (program, view) in enumerate(zip(programs, first.siblings, strict=True)):
        inputs = [of._by_share[index]._rows if type(of) is MultiShareBatch else of for of in call.inputs]
        for at in call.plain if plain else ():
            inputs[at] = view.replicate(inputs[at])
        batches = [batch._by_share[index] for batch in call.batches]  # type: ignore[attr-defined]
        try:
            outs.append(program(inputs, batches))
        except Outdated:
            return NotImplemented
        except Exception as error:  # the others may write what this share has written before
            failed = failed or error
    if failed is not None:
        raise with_global_shapes(failed, call) from None
    count_write(call.func, call.kwargs, call.batches)
    return join_results(outs, call.batches)  # type: ignore[arg-type]


def _programs_of_shares(call: DescribedCall) -> Any:
    """Return the program of each local share for a call with this key; None if one has none."""
    key, shares, siblings = call.key, call.view.shares, call.view.siblings
    programs = shares.programs[key] if key is not None else None
    if programs is None and key is not None and (calls := shares.calls[key] or 0) <= 2 * _RECORDED_AT_MOST:
        shares.calls.keep(key, calls + 1)
        arguments = [of_share((call.args, call.kwargs), index) for index in range(shares.count)]
        keys = [DescribedCall(call.func, *of_one_share).key for of_one_share in arguments]
        recorded = [view.programs[key] for view, key in zip(siblings, keys, strict=True) if key is not None]
        if len(recorded) == len(keys) and None not in recorded:
            shares.programs.keep(key, programs := recorded)
    return programs
