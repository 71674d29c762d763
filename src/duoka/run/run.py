"""What a script holds in its hand while it runs on one device or many."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.data.loader import Loader, ViewWord, make_loader
from duoka.errors import OptionError, PeerLost, RanksApart
from duoka.logs import Logs, check_step, check_values
from duoka.origins import Origin
from duoka.process import this_process
from duoka.run.agreement import check_same, gather_objects
from duoka.run.collect import OwnNumbers
from duoka.run.models import check_options, move, prepare
from duoka.run.placing import Devices, Placing, check_strategy
from duoka.run.precision import Precision, check_precision, set_precision
from duoka.run.progress import Progress
from duoka.run.reached import DdpOptions
from duoka.run.scaling import Scale
from duoka.run.session import ApiSession, open_session, set_exact_threads, settings_with
from duoka.run.sharding import Sharding
from duoka.supervision.tracebacks import headline
from duoka.view.batch import BatchTensor, batches_in, gather_all
from duoka.view.collectives import Collectives
from duoka.view.cut import Cut

M = TypeVar("M", bound=nn.Module)


class Run:
    """One rank of a run, from `duoka.start()` to `close()`. Works as a context manager.

    rank, world_size: among all ranks. local_rank: among those of this machine. device: where this rank computes.
    machine: its host name. is_first: whether this is rank 0, the one that prints and writes.
    """

    def __init__(
        self, origin: Origin, device: torch.device, session: ApiSession, logs: Logs, timeout: float = 600.0
    ) -> None:
        self.rank, self.world_size = origin.rank, origin.world_size
        self.local_rank = origin.local_rank
        self.device = device
        self.machine = socket.gethostname()
        self._opened: ApiSession | None = session
        self._logs = logs
        self._own_numbers = OwnNumbers(session.ranks)
        self._checkpoints: list[Checkpoint] = []
        self._begun = False  # something was made that has a strategy
        self._placing = Placing(session, device, timeout)
        self._sharding = Sharding(session, device, timeout)
        self._scale: Scale | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def model(
        self,
        module: M,
        *,
        compile: bool = False,  # noqa: A002
        precision: Precision = "32",
        strategy: str = "auto",
        shares: int | None = None,
        devices: Devices | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        broadcast_buffers: bool | None = None,
        gradient_as_bucket_view: bool = False,
        **more: Any,
    ) -> M:
        """The same module, in place: on this rank's device, with rank 0's weights, and kept in step from now on.

        Args:
            module: is changed in place; its parameters stay the same objects, but for "fsdp".
            compile: compile it, in place; the names in its state dict stay.
            precision: "bf16" or "fp16": its forward passes compute under autocast, and give float32; weights and
                gradients stay float32. With "fp16" gradients are scaled within the model, and steps for which one
                is not finite are left out.
            strategy: "auto": as many ranks keep it in step as there are. "fsdp": each of them holds a part of it, of
                its gradients and of what an optimizer keeps, which is made afterwards. "dp": this one process
                computes each batch on several devices. "exact": the same bits on 1, 2, 4, ... ranks; it holds for all
                models of a run, so it is asked for with the first, before anything else is made.
            shares: of "exact": into how many shares each batch is cut, a power of two; None: 8, or as many as ranks.
            devices: of "dp": how many, in the words of `--devices`, or a list. The first holds the parameters.
            output_device: of "dp": where its outputs come together; the first of them, if left out.
            dim: of "dp": where samples are in its inputs.
            find_unused_parameters: True: what a backward pass leaves out is nobody's business; False: it is an
                error; None: it is told, once. Any may be left out.
            static_graph: every backward pass reaches the same parameters; else it is an error.
            broadcast_buffers: all ranks have rank 0's buffers after each pass; None: with batch_norm="local" only,
                as they are the same else.
            gradient_as_bucket_view: gradients are parts of larger tensors, which spares a copy.
            more: `device_ids`, another name of `devices`. Options of DistributedDataParallel that there are not are
                told why.

        Raises:
            OptionError: it is no `nn.Module`, has no parameters, or is wrapped; or an option cannot be had.
            DeviceError: a device is not there.
            RanksApart: its parameters have other names or shapes on another rank.
        """
        if strategy == "dp" and devices is None:
            devices = more.pop("device_ids", None)
        check_options(more)
        check_precision(precision)
        check_strategy(strategy, self.world_size, devices)
        session = self._use(strategy, shares)
        self._begun = True
        if session.view.own.exact and (strategy in ("dp", "fsdp") or precision == "fp16"):
            given = "precision='fp16'" if precision == "fp16" else f"strategy={strategy!r}"
            raise OptionError("run.model", given, "left out in a run of strategy='exact'", "bf16 can be had")
        options = DdpOptions(find_unused_parameters, static_graph, broadcast_buffers, gradient_as_bucket_view)
        if compile and (strategy == "dp" or precision == "fp16"):
            raise OptionError("compile", True, "left out with strategy='dp' or precision='fp16'", "bf16 compiles")
        on = self._placing.devices(strategy, devices)
        bring: Callable[[nn.Module], None] = partial(move, device=on[0])
        if strategy == "fsdp":
            asked = {"compile": compile, "gradient_as_bucket_view": gradient_as_bucket_view, "precision": precision}
            bring = self._sharding.sharding(asked)
        prepare(module, session, bring)
        session.passes.look_at(module, options)
        if gradient_as_bucket_view:
            session.strategy.give_views(module.parameters())
        if strategy == "dp":
            self._placing.share_out(module, on, output_device, dim)
        if precision == "fp16":
            self._scale = self._scale or Scale(session.say)
        set_precision(module, precision, self.device, self._scale)
        if compile:
            module.compile()
        return module

    def loss(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> nn.Module:
        """The loss function next to the model: `run.loss(model, loss)(x, y)` is `loss(model(x), y)`.

        For a model of strategy "dp", each device computes the losses of its own rows, so that outputs need not come
        together on the first.

        Args:
            model: has been given to `run.model`.
            loss: gives a value for each sample (reduction="none"): a mean over a device's rows would not be the
                batch's.

        Raises:
            OptionError: when it is called: the loss is of all samples together.
        """
        self._session  # noqa: B018  # is it open?
        return self._placing.with_loss(model, loss)

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        accumulate: int | None = None,
        micro_batch: int | None = None,
        view: ViewWord = "global",
        **how: Any,
    ) -> Loader:
        """Global batches: each rank loads and holds its own rows of them, on its device.

        Args:
            data: a dataset, a `DataLoader` (taken as it is), or tensors or arrays of as many rows.
            batch_size: samples of a batch, all ranks together.
            shuffle: in a new order every epoch, as `DataLoader` draws it.
            accumulate: yield every batch as so many `Pieces`, whose gradients are added up.
            micro_batch: the same, in pieces of so many samples at most.
            view: "global": batch tensors; "local": this rank's rows as plain tensors, and gradients weighted by how
                many these are.
            how: further options of `DataLoader`: sampler, num_workers, collate_fn, drop_last, ...

        Raises:
            OptionError: something that is not allowed, alone or together with the rest.
        """
        session = self._session
        self._begun = True
        if view == "local" and session.view.own.exact:
            raise OptionError("view", view, "'global' with strategy='exact'", "it cuts a rank's rows into shares")

        def on_share(cut: Cut | None) -> None:
            session.calls.own_rows = cut

        return make_loader(
            data,
            batch_size,
            session.view,
            self.device,
            session.plan.loading,
            on_share,
            session.strategy.held,
            session.calls.computed_whole,
            shuffle=shuffle,
            accumulate=accumulate,
            micro_batch=micro_batch,
            how=how,
            words=view,
        )

    def batch(self, tensor: Any) -> Tensor:
        """A batch tensor of a tensor that is the same on all ranks, shape (n, ...): each computes its own rows.

        With one rank, or with fewer samples than ranks, the tensor itself.

        Raises:
            OptionError: it has no rows.
        """
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise OptionError("run.batch", tensor, "given a tensor with samples in its first dimension")
        session = self._session
        self._begun = True
        n = tensor.shape[0]
        if isinstance(tensor, BatchTensor) or session.view.ranks.world_size == 1 or not session.view.shares(n):
            return tensor
        return BatchTensor.of(tensor, session.view)

    def checkpoint(
        self,
        directory: str | Path,
        *,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_seconds: float | None = None,
        keep: int | None = 2,
        best: Literal["max", "min"] | None = None,
        **states: Any,
    ) -> Checkpoint:
        """A `duoka.Checkpoint` of these states, by name, that all ranks save and restore together.

        With the loader among them, a run goes on at the next batch that was not seen, on any number of ranks. It is
        closed with the run. The scale of gradients in float16 is among them by itself.

        Args:
            directory: where to; one that all machines see.
            every_steps: how often to save; None for never.
            every_epochs: the same, in epochs of `epochs`.
            every_seconds: the same, in seconds.
            keep: how many to keep, the newest; None for all.
            best: "max" or "min": also keep the one with the best metric.
            states: what to save, by name: `model=model, optimizer=optimizer, loader=train, ...`.

        Raises:
            OptionError: something that is not allowed.
        """
        ranks = self._session.ranks
        if not states:
            raise OptionError(
                "run.checkpoint", "nothing", "given what to save: model=model, optimizer=optimizer, ..."
            )
        scale = {} if self._scale is None else {"loss_scale": self._scale}
        saved = Checkpoint(
            directory,
            scale | states,
            ranks=ranks,
            every_steps=every_steps,
            every_epochs=every_epochs,
            every_seconds=every_seconds,
            keep=keep,
            best=best,
        )
        self._checkpoints.append(saved)
        return saved

    # --- numbers of ranks that work by themselves

    def all_sum(self, value: Any) -> Any:
        """The sum over ranks of a tensor, a number, or a dict of them, as `value` itself is.

        Raises:
            OptionError: it is a batch tensor, which is the whole batch's already.
            RanksApart: it has another shape or type on another rank.
        """
        return self._numbers.all_sum(value)

    def all_mean(self, value: Any) -> Any:
        """The mean over ranks; floating-point. As `all_sum`."""
        return self._numbers.all_mean(value)

    def all_gather(self, value: Any) -> Any:
        """The rows of all ranks, in the order of ranks, which is that of the samples in a batch. As `all_sum`.

        The first dimension may differ between ranks. A number becomes a tensor of shape (world_size,).
        """
        return self._numbers.all_gather(value)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, which pickle must know, in the order of ranks: on every rank."""
        return gather_objects(value, self._session.ranks)

    # --- what happens once

    def print(self, *values: Any, **how: Any) -> None:
        """Print on rank 0 only; a batch is gathered for it, so all ranks have to come here."""
        self._session  # noqa: B018  # is it open?
        values = gather_all(values) if batches_in(values) else values
        if self.is_first:
            print(*values, **how)

    def log(self, step: int | None = None, **values: Any) -> None:
        """Write numbers to the logs that `duoka.start(log=...)` named; rank 0 does, so call it anywhere.

        Raises:
            OptionError: a value is no number, text, or tensor of one element; or the step is no whole number.
        """
        self._session  # noqa: B018  # is it open?
        check_step(step)
        check_values(values)
        self._logs.write(step, values)

    def progress(self, batches: Iterable[Any], name: str = "batches") -> Progress:
        """The same batches, with a progress bar (rank 0); plain lines where standard output is no terminal."""
        self._session  # noqa: B018  # is it open?
        return Progress(batches, name, self.is_first, sys.stdout)

    @contextmanager
    def first(self) -> Iterator[bool]:
        """Rank 0 goes through the body before the others do: what it downloads is there when they look for it.

        Gives whether this is rank 0.

        Raises:
            PeerLost: rank 0 failed in it, with an error of its own.
        """
        ranks = self._session.ranks
        if not self.is_first:
            if failed := ranks.broadcast_object("", 0):
                raise PeerLost(f"rank 0 failed in `with run.first()`: {failed}")
            yield False
            return
        try:
            yield True
        except BaseException as error:
            ranks.broadcast_object(headline(error), 0)
            raise
        ranks.broadcast_object("", 0)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._session.ranks.barrier()

    @contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Backward passes within add to the gradients of `models` on each rank alone.

        The first backward pass after it brings the ranks together, with all that was added. Of models of strategy
        "fsdp" each pass does, as holding their gradients would take the room of all.
        """
        if not models:
            raise OptionError("run.no_sync", "nothing", "given the models whose gradients are to be held")
        parameters = [parameter for model in models for parameter in model.parameters()]
        with self._session.strategy.held(parameters):
            yield

    def has_held(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient of these is this rank's own, by `no_sync` or within the pieces of a batch."""
        return self._session.strategy.has_held(parameters)

    # --- its end

    def close(self, wait: bool = True) -> None:
        """End the run: wait for the other ranks, unless `wait` is False, and put back all that was intercepted."""
        if self._opened is None:
            return
        session, self._opened = self._opened, None
        this_process().run = None
        try:
            if wait:
                self._wait_for_all(session.ranks)
        finally:
            for saved in self._checkpoints:
                saved.close(wait=False)
            self._placing.close()
            self._sharding.close()
            if self._scale is not None:
                self._scale.close()
            session.strategy.close()
            session.patches.undo()
            self._logs.close(failed=not wait)

    def _wait_for_all(self, ranks: Collectives) -> None:
        try:
            ranks.barrier()
            for saved in self._checkpoints:
                saved.wait()
        except RanksApart as error:
            raise RanksApart(f"rank {self.rank} has ended its run, while another went on: {error}") from None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def __repr__(self) -> str:
        state = "" if self._opened is not None else ", closed"
        return f"Run(rank {self.rank} of {self.world_size}, {self.device}, {self.machine}{state})"

    def _use(self, strategy: str, shares: int | None) -> ApiSession:
        """The session, opened anew if another strategy is asked for."""
        session = self._session
        settings = settings_with(session.plan, strategy, shares)
        check_same(
            settings, session.ranks, lambda first, other: f"run.model was given {first} by rank 0, but {other}"
        )
        if settings == session.plan:
            return session
        if self._begun:
            hint = "ask for it with the first model, or by duoka run --strategy exact"
            raise OptionError("run.model", f"strategy={strategy!r}", "given before anything else is made", hint)
        session.strategy.close()
        session.patches.undo()
        self._opened = open_session(session.ranks, settings, session.chance.entropy, session.say)
        set_exact_threads()
        session.say(f"strategy exact with {self._opened.view.own.world_size} shares of each batch")
        return self._opened

    @property
    def _numbers(self) -> OwnNumbers:
        self._session  # noqa: B018  # is it open?
        return self._own_numbers

    @property
    def _session(self) -> ApiSession:
        if self._opened is None:
            frame = sys._getframe(1)
            while frame.f_code.co_name.startswith("_") and frame.f_back is not None:
                frame = frame.f_back
            called = f"run.{frame.f_code.co_name}"
            raise OptionError(called, "used after run.close()", "used before", "duoka.start() begins another")
        return self._opened
