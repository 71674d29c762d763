"""One process computes each batch on several devices, after nn.DataParallel.

Copies of the model compute their rows at the same time, in a thread each; outputs come together on one device.
What autograd knows of the copies brings gradients home, so between processes there is nothing to keep in step.

What nn.DataParallel leaves open is as on one device: how a call is cut is found out as for ranks (view/seams.py),
and a model whose rows mix is computed whole; draws are those of one random stream; BatchNorm has the statistics of
the whole batch; what the forward pass leaves in attributes is the model's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.private.torch import tree_flatten, tree_map_only, tree_unflatten
from duoka.strategies.copies import Copies
from duoka.strategies.meeting import CopySeat, Draws, Meeting
from duoka.strategies.single import Single
from duoka.view.alone import OneRank
from duoka.view.call import Call
from duoka.view.contents import Contents
from duoka.view.cut import Cut
from duoka.view.draws import SeededMode, random_states, same_states
from duoka.view.learning import Learned, Place, spec_at
from duoka.view.norm import Normalising, in_training
from duoka.view.seams import Opened, Seam, Seams
from duoka.view.site import user_line
from duoka.view.standin import StandIn
from duoka.view.view import View


class Dp(Single):
    """Copies of a model on several devices of one process.

    timeout: seconds that a copy waits for another. whole_norm: BatchNorm uses the whole batch's statistics. say:
    shows the user a line.
    """

    def __init__(self, timeout: float = 600.0, whole_norm: bool = True, say: Callable[[str], None] = print) -> None:
        self.timeout, self.whole_norm, self.say = timeout, whole_norm, say
        self._here = threading.local()

    def share_out(self, module: nn.Module, devices: Sequence[torch.device], output: torch.device, dim: int) -> None:
        """From now on `module` computes on all of `devices`; its parameters stay on the first.

        output: where outputs come together. dim: where samples are in its inputs.
        """
        _OnDevices(module, tuple(devices), output, dim, self)

    def share_out_as(self, module: nn.Module, other: nn.Module) -> None:
        """`other` computes on the devices that `module` computes on, if there are several."""
        now = module.__dict__.get("forward")
        while isinstance(now, StandIn) and not isinstance(now, _OnDevices):
            now = now.before
        if isinstance(now, _OnDevices):
            self.share_out(other, now.devices, now.output, now.dim)

    @property
    def seat(self) -> CopySeat | None:
        """The copy that this thread computes for."""
        return getattr(self._here, "seat", None)

    @contextmanager
    def seated(self, seat: CopySeat) -> Iterator[None]:
        """This thread computes for a copy."""
        self._here.seat = seat
        try:
            with SeededMode(seat.draw) if seat.draws.places else nullcontext():
                yield
        finally:
            self._here.seat = None

    # --- what is intercepted while there is such a model

    def batch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`F.batch_norm` of a copy's rows: with the statistics of all copies' rows."""

        def of_copies(call: Normalising) -> Tensor | None:
            seat = self.seat
            return None if seat is None or not self.whole_norm else seat.batch_norm(call)

        return in_training(original, of_copies)

    def checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Activations that are computed anew in the backward pass: with the draws and statistics that they had."""

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            seat = self.seat
            return original(function if seat is None else self._repeatable(function, seat), *args, **kwargs)

        return checkpoint

    def reentrant_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same with use_reentrant=True, whose backward pass knows nothing of the other copies."""

        def apply(*args: Any) -> Any:
            if self.seat is not None:
                raise Refused(f"checkpoint(use_reentrant=True) at {user_line()} under strategy='dp': use False")
            return original(*args)

        return apply

    def _repeatable(self, function: Callable[..., Any], seat: CopySeat) -> Callable[..., Any]:
        repeat = seat.from_here()

        def again(*args: Any, **kwargs: Any) -> Any:
            if self.seat is not None:
                return function(*args, **kwargs)
            with self.seated(repeat()):
                return function(*args, **kwargs)

        return again


class _AllOfThem(OneRank):
    """One process that holds the shares of several ranks: what it finds out needs not be told."""

    def __init__(self, shares: int) -> None:
        self.rank, self.world_size = shares - 1, shares  # the last has one of the largest shares

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise Refused(f"strategy='dp' cannot share out what is computed at {user_line()}; use duoka run")


class _OnDevices(StandIn):
    """The forward pass of a model that computes on several devices."""

    def __init__(
        self, module: nn.Module, devices: tuple[torch.device, ...], output: torch.device, dim: int, dp: Dp
    ) -> None:
        super().__init__(module)
        self.devices, self.output, self.dim, self._dp = devices, output, dim, dp
        self._view = View(_AllOfThem(len(devices)), adopt=lambda _: None, say=dp.say)
        self._seams = Seams(self._view, lambda _: nullcontext(), lambda module, learned: False)
        self._looking = False
        self._calls = 0

    def __reduce__(self) -> Any:
        """A copy of the model computes on one device."""
        return _stands_for, (self.module, self.before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._looking or self._dp.seat is not None:
            return self.original(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        lead = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > self.dim), None)
        if lead is None or not self._view.shares(leaves[lead].shape[self.dim]):
            return self._whole(args, kwargs)

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.original(*args, **kwargs)

        call = Call(forward, self.module, leaves, tree, None, ((lead, self.dim),))
        self._looking = True
        try:
            found = self._seams.of(call)
        finally:
            self._looking = False
        if isinstance(found, Opened):
            self._say_why()
        if not isinstance(found, Seam):
            return self._whole(args, kwargs)
        return self._shared(call, found, leaves[lead].shape[self.dim])

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to(self.devices[0]), (args, kwargs))
        return tree_map_only(Tensor, lambda leaf: leaf.to(self.output), self.original(*args, **kwargs))

    def _say_why(self) -> None:
        name = type(self.module).__name__
        reason = self._view.opened.get((name, user_line()))
        if reason is not None:
            self._view.say(f"{name} at {user_line()} is computed whole on {self.devices[0]}: {reason}")

    def _shared(self, call: Call, seam: Seam, n: int) -> Any:
        """All copies compute their rows."""
        self._calls += 1
        learned, many = seam.learned, len(self.devices)
        draws, meeting = Draws(learned.draws.get("", ()), self._view), Meeting(many, self._dp.timeout)
        cuts = [Cut(n, number, many) for number in range(many)]
        copies = Copies(self.module, self.devices)
        forwards, context, before = copies.of(self), _surroundings(self.devices), random_states()

        def compute(number: int) -> Any:
            device, cut = self.devices[number], cuts[number]
            seat = CopySeat(number, cut, draws, meeting)
            args, kwargs = tree_unflatten(_rows(call.leaves, seam.inputs, cut, device), call.tree)
            with context(device), self._dp.seated(seat):
                out = Contents(forwards[number](*args, **kwargs))
                meeting.exchange(number, "its end", None)
                return out

        outputs = _in_threads(compute, many, meeting)
        self._check_draws(before, bool(draws.places))
        draws.finish()
        copies.keep_changes(compare_buffers=self._dp.whole_norm and not self._calls & (self._calls - 1))
        return self._gathered(outputs, learned, cuts)

    def _check_draws(self, before: tuple[Any, ...], known: bool) -> None:
        """Copies draw nothing but what was learned, which they draw alike. known: there is such."""
        after = random_states()
        if not same_states((after[0], *before[1:]) if known else before, after):
            raise Refused(
                f"{type(self.module).__name__} at {user_line()} draws random numbers in a way that its copies cannot "
                "share (Python's or numpy's, or none in its first call): use torch's, or several workers"
            )

    def _gathered(self, outputs: list[Contents], learned: Learned, cuts: list[Cut]) -> Any:
        if any(len(out.leaves) != len(learned.outputs) for out in outputs):
            raise Refused(
                f"{type(self.module).__name__} at {user_line()} gave another number of outputs than at first"
            )
        leaves = []
        for place, *parts in zip(learned.outputs, *(out.leaves for out in outputs), strict=True):
            if place is None:
                first = parts[0]
                leaves.append(first.to(self.output) if isinstance(first, Tensor) else first)
            else:
                leaves.append(_joined([part.to(self.output) for part in parts], place, cuts, self._view))
        return outputs[0].put(leaves)


def _stands_for(module: nn.Module, before: Any) -> StandIn:
    plain = StandIn.__new__(StandIn)
    plain.module, plain.before = module, before
    return plain


def _rows(leaves: list[Any], dims: tuple[int | None, ...], cut: Cut, device: torch.device) -> list[Any]:
    """What one copy is given: its rows of what is cut, all of what is not."""
    found = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if not isinstance(leaf, Tensor):
            found.append(leaf)
            continue
        own = leaf.narrow(dim, cut.start, cut.rows) if dim is not None and leaf.shape[dim] == cut.n else leaf
        found.append(own.to(device, non_blocking=device.type == "cuda"))
    return found


def _joined(parts: list[Tensor], place: Place, cuts: list[Cut], view: View) -> Tensor:
    """The rows of all copies, in one tensor."""
    if not place.outer:
        return torch.cat(parts, place.dim)
    specs = [spec_at(view, place, tuple(part.shape), cut) for part, cut in zip(parts, cuts, strict=True)]
    apart = [part.unflatten(place.dim, (spec.outer, spec.cut.rows)) for part, spec in zip(parts, specs, strict=True)]
    joined: Tensor = torch.cat(apart, place.dim + 1).flatten(place.dim, place.dim + 1)
    return joined


def _surroundings(devices: Sequence[torch.device]) -> Callable[[torch.device], ExitStack]:
    """A context for another thread that computes as this one would: gradients, autocast, streams."""
    streams = {device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"}
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    types = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in types]

    def entered(device: torch.device) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype, cached in casts:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        if device in streams:
            stack.enter_context(torch.cuda.stream(streams[device]))  # and its device
        return stack

    return entered


def _in_threads(compute: Callable[[int], Any], many: int, meeting: Meeting) -> list[Any]:
    """compute(0), compute(1), ...: the first here, the others beside it. Raises the first error of any."""
    outputs: list[Any] = [None] * many
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            outputs[number] = compute(number)
        except threading.BrokenBarrierError:  # another failed, or did not come
            errors.append(Refused(meeting.lost(number)))
        except BaseException as error:
            errors.insert(0, error)
            meeting.leave()

    threads = [threading.Thread(target=one, args=(number,), name=f"duoka dp {number}") for number in range(1, many)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outputs
