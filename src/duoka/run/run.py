"""The object that a script uses while it runs on one device or many."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.collectives.base import Collectives
from duoka.data.loader import Loader, make_loader
from duoka.errors import OptionError, PeerLost, RanksApart
from duoka.origins.origin import Origin
from duoka.origins.process import this_process
from duoka.plain.session import Session
from duoka.planning.plan import check_strategy
from duoka.run.agreement import LocalReductions, check_same, gather_objects
from duoka.run.api_session import open_api_session, set_exact_threads, settings_with
from duoka.run.backward import BackwardObserver, DdpOptions
from duoka.run.logs import Logs
from duoka.run.models import NOT_OPTIONS, chosen_strategy, prepare
from duoka.supervision.tracebacks import headline
from duoka.view.tensor.batch import BatchTensor, batches_in, gather_all

M = TypeVar("M", bound=nn.Module)


class Run:
    """One rank of a run, from `duoka.start()` to `close()`. Works as a context manager.

    rank, world_size: among all ranks. local_rank: among those of this machine. device: of this rank.
    machine: host name. is_first: whether this is rank 0, which prints and writes.
    """

    def __init__(self, origin: Origin, device: torch.device, session: Session, logs: Logs) -> None:
        self.rank, self.world_size = origin.rank, origin.world_size
        self.local_rank, self.is_first = origin.local_rank, origin.rank == 0
        self.device = device
        self.machine = socket.gethostname()
        self._machine_name = origin.machine
        self._opened: Session | None = None
        self._open(session)
        self._logs = logs
        self._reductions = LocalReductions(session.ranks)
        self._checkpoints: list[Checkpoint] = []
        self._begun = False  # an object was made that depends on the strategy

    def model(
        self,
        module: M,
        *,
        strategy: str = "auto",
        shares: int | None = None,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
        broadcast_buffers: bool | None = None,
        gradient_as_bucket_view: bool = False,
        **more: Any,
    ) -> M:
        """Move a module to this rank's device with rank 0's weights, and keep its parameters in step. Returns it.

        Args:
            module: is changed in place; its parameters stay the same objects.
            strategy: "ddp": gradients are averaged over ranks. "fsdp": each rank holds a part of the parameters, of
                their gradients and of the state of optimizers. "hsdp": as fsdp within each machine, and gradients are
                averaged between machines, which have the same number of ranks. "auto": ddp, or hsdp or fsdp where
                parameters, gradients and Adam's state do not fit into a device, which is said. "exact": the same bits
                on any number of ranks; it holds for all models of a run, and is given with the first, before anything
                else is made.
            shares: for "exact": the number of shares of each batch, a power of two; None: 8, or the number of ranks
                if that is larger.
            find_unused_parameters: True: a backward pass may leave out parameters; False: that is an error; None: it
                is reported once.
            static_graph: every backward pass must reach the same parameters; else it is an error.
            broadcast_buffers: copy rank 0's buffers to all ranks after each pass; None: only with
                batch_norm="local", as they are equal otherwise.
            gradient_as_bucket_view: gradients are views of larger tensors, which saves a copy.
            more: further options of DistributedDataParallel and of other libraries raise an error with the reason.

        Raises:
            OptionError: it is no `nn.Module`, has no parameters, or is wrapped; or an option is not allowed.
            RanksApart: its parameters have other names or shapes on another rank.
        """
        check_strategy("strategy", strategy)
        for name in more:
            hint = NOT_OPTIONS.get(name, "help(run.model) lists the options")
            raise OptionError("run.model", name, "given no such option", hint)
        session = self._use(strategy, shares)
        self._begun = True
        if session.view.shares.exact and strategy in ("fsdp", "hsdp"):
            raise OptionError("run.model", f"strategy={strategy!r}", "left out in a run of strategy='exact'")
        if strategy == "single" and self.world_size > 1:
            raise OptionError("strategy", "single", f"auto or ddp for {self.world_size} ranks")
        if strategy == "auto":
            strategy = chosen_strategy(module, self._machine_name, session, self.device)
        options = DdpOptions(find_unused_parameters, static_graph, broadcast_buffers, gradient_as_bucket_view)
        prepare(module, strategy, self._machine_name, session, self.device)
        self._backward.observe(module, options)
        if gradient_as_bucket_view:
            session.strategy.use_bucket_views(module.parameters())
        return module

    def loader(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        accumulate: int | None = None,
        micro_batch: int | None = None,
        **how: Any,
    ) -> Loader:
        """Return a loader of global batches: each rank loads and holds its own rows of them, on its device.

        Args:
            data: a dataset, a `DataLoader` (used as it is), or tensors or arrays with equal numbers of rows.
            batch_size: samples of a batch, all ranks together.
            shuffle: in a new order every epoch, as `DataLoader` draws it.
            accumulate: yield every batch as so many `Pieces`, whose gradients are accumulated.
            micro_batch: the same, in pieces of at most so many samples.
            how: further options of `DataLoader`: sampler, num_workers, collate_fn, drop_last, ...

        Raises:
            OptionError: an option is not allowed, alone or together with the others.
        """
        session = self._session
        self._begun = True
        return make_loader(
            data,
            batch_size,
            session.view,
            self.device,
            session.settings.loading,
            session.strategy.no_sync,
            session.rank_local,
            shuffle=shuffle,
            accumulate=accumulate,
            micro_batch=micro_batch,
            how=how,
        )

    def batch(self, tensor: Any) -> Tensor:
        """Return a batch tensor of a tensor that is equal on all ranks, shape (n, ...): each computes its own rows.

        With one rank, or with fewer samples than ranks, it returns the tensor itself.

        Raises:
            OptionError: the tensor has no rows.
        """
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise OptionError("run.batch", tensor, "given a tensor with samples in its first dimension")
        session = self._session
        self._begun = True
        if isinstance(tensor, BatchTensor) or not session.view.splits(tensor.shape[0]):
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
        """Return a `duoka.Checkpoint` of these states, which all ranks save and restore together.

        With the loader among them, a run goes on at the next batch not seen yet, on any number of ranks. The
        checkpoint is closed with the run.

        Args:
            directory: the same on all machines, such as on a network file system.
            every_steps: steps between two saves; None: never.
            every_epochs: the same, in epochs of `epochs`.
            every_seconds: the same, in seconds.
            keep: number of checkpoints to keep, the newest; None: all.
            best: "max" or "min": also keep the one with the best metric.
            states: what to save, by name: `model=model, optimizer=optimizer, loader=train, ...`.

        Raises:
            OptionError: an option is not allowed.
        """
        ranks = self._session.ranks
        if not states:
            raise OptionError(
                "run.checkpoint", "nothing", "given what to save: model=model, optimizer=optimizer, ..."
            )
        saved = Checkpoint(
            directory,
            states,
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
        """Return the sum over ranks of a tensor, a number, or a dict or list of them, of the type of `value`.

        Raises:
            OptionError: it is a batch tensor, whose sums are of the whole batch already.
            RanksApart: it has another shape or dtype on another rank.
        """
        return self._reduce("all_sum", value)

    def all_mean(self, value: Any) -> Any:
        """Return the mean over ranks, in floating point. Else as `all_sum`."""
        return self._reduce("all_mean", value)

    def all_gather(self, value: Any) -> Any:
        """Return the rows of all ranks, in the order of ranks, which is that of the samples in a batch.

        The first dimension may differ between ranks. A number becomes a tensor of shape (world_size,). Else as
        `all_sum`.
        """
        return self._reduce("all_gather", value)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, which must be picklable, in the order of ranks."""
        return gather_objects(value, self._session.ranks)

    # --- what happens once

    def print(self, *values: Any, **how: Any) -> None:
        """Print on rank 0 only. Call it on all ranks: batch tensors are gathered."""
        self._check_open()
        values = gather_all(values) if batches_in(values) else values
        if self.is_first:
            print(*values, **how)

    def log(self, step: int | None = None, **values: Any) -> None:
        """Write numbers to the logs of `duoka.start(log=...)`, on rank 0. It may be called on any ranks.

        Raises:
            OptionError: a value is no number, text, or tensor of one element; or the step is no whole number.
        """
        self._check_open()
        self._logs.write(step, values)

    @contextmanager
    def first(self) -> Iterator[bool]:
        """Run the body on rank 0 before the other ranks run it, so that they find what it downloads.

        Yields whether this is rank 0.

        Raises:
            PeerLost: rank 0 raised an error in it.
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
        """Within the context, let backward passes add to the gradients of `models` on each rank alone.

        The first backward pass after it averages all that was added. With strategy "fsdp" whole gradients are kept
        in memory of their own until then, or until something reads or sets a gradient: an optimizer, clipping.
        """
        if not models:
            raise OptionError("models", models, "at least one model", "for example: run.no_sync(model)")
        parameters = [parameter for model in models for parameter in model.parameters()]
        with self._session.strategy.no_sync(parameters):
            yield

    # --- its end

    def close(self, wait: bool = True) -> None:
        """End the run: wait for the other ranks, unless `wait` is False, and undo all interceptions."""
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
            session.strategy.close()
            session.patches.undo()
            self._logs.close()

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

    def _use(self, strategy: str, shares: int | None) -> Session:
        """Return the session; open a new one if another strategy is requested."""
        session = self._session
        settings = settings_with(session.settings, strategy, shares)
        check_same(
            settings, session.ranks, lambda first, other: f"run.model was given {first} by rank 0, but {other}"
        )
        if settings == session.settings:
            return session
        if self._begun:
            hint = "ask for it with the first model, or by duoka run --strategy exact"
            raise OptionError("run.model", f"strategy={strategy!r}", "given before anything else is made", hint)
        session.strategy.close()
        session.patches.undo()
        entropy = session.shared_random.entropy
        session = open_api_session(session.ranks, settings, self.device, entropy, session.say)
        self._open(session)
        set_exact_threads()
        session.say(f"strategy exact with {session.settings.shares} shares of each batch")
        return session

    def _open(self, session: Session) -> None:
        self._opened = session
        self._backward = BackwardObserver(session.ranks, session.settings.batch_norm == "local", session.say)
        session.strategy.observe(self._backward)

    def _check_open(self) -> None:
        """Raise OptionError if the run was closed."""
        self._session  # noqa: B018

    def _reduce(self, name: str, value: Any) -> Any:
        self._check_open()
        return self._reductions.reduce(name, value)

    @property
    def _session(self) -> Session:
        if self._opened is None:
            frame = sys._getframe(1)
            while frame.f_code.co_name.startswith("_") and frame.f_back is not None:
                frame = frame.f_back
            called = f"run.{frame.f_code.co_name}"
            raise OptionError(called, "used after run.close()", "used before", "duoka.start() begins another")
        return self._opened
