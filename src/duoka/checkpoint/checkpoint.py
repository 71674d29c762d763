"""`Checkpoint`: saves a training run, and restores it; also when a signal asks it to end."""

from __future__ import annotations

import os
import platform
import re
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from duoka.checkpoint import directory
from duoka.checkpoint.directory import TREES, Lock, Manifest, StateEntry, is_number
from duoka.checkpoint.formats import safetensors
from duoka.checkpoint.loading import load_weights
from duoka.checkpoint.ranks import Ranks, on_first, ranks_here, together
from duoka.checkpoint.sharded import are_first, share_files
from duoka.checkpoint.snapshot import BackgroundTask, Memory, Snapshot, begin, give_up, write, write_part
from duoka.checkpoint.states import RandomGenerators, SavedState, States, kind_of
from duoka.errors import CheckpointDamaged, CheckpointError, OptionError
from duoka.origins.process import this_process
from duoka.system import disk

RANDOM = "random"
CHECK_INTERVAL = 0.2  # seconds between two checks of several ranks for a signal to end


@dataclass(frozen=True)
class Position:
    """The position of a restored run. step: steps done. epoch: epochs finished, and the index of the next."""

    step: int
    epoch: int
    directory: Path


class Checkpoint:
    """Saves all state needed to continue training, and restores it.

        saved = Checkpoint("out/run", {"model": model, "optimizer": optimizer, "loader": loader}, every_steps=1000)
        for epoch in saved.epochs(10):
            for batch in loader:
                ...
                saved.step()

    Each save is a directory `step-00001200` with safetensors, JSON and a manifest of their SHA-256. A thread writes
    it; the training loop waits only for the copy to memory, and for the previous save if it is still running. Errors
    of the thread are raised by the next `step`, `save` or `wait`, on every rank.

    After SIGTERM or SIGUSR1 all ranks save at the same step, and `step` raises `Preempted` (exit code 75). This holds
    within `epochs`; for other loops, within `with saved:`, which also waits for the last save.

    Args:
        directory: of all saves; created if missing. One run at a time can write into it.
        states: the states to save, by name: models, optimizers, anything with `state_dict()` and `load_state_dict()`;
            tensors, lists, dicts and sets, which are restored in place; numbers and strings, which are in `values`.
            Random generators are always saved. A state with `register_step_hook` calls `step` itself.
        ranks: the ranks that save together; by default those of torch.distributed.
        every_steps, every_epochs, every_seconds: intervals at which `step` and `epochs` save; None for never.
        keep: number of newest checkpoints to keep; None for all.
        best: "max" or "min": also keep the checkpoint with the best `metric`.

    Attributes:
        values: the numbers and strings among the states. Assign new values here.
        metric: of the current model; stored by the next save.
        step_number, epoch: steps done, epochs finished.
    """

    def __init__(
        self,
        directory: str | Path,
        states: Mapping[str, Any],
        *,
        ranks: Ranks | None = None,
        every_steps: int | None = None,
        every_epochs: int | None = 1,
        every_seconds: float | None = None,
        keep: int | None = 2,
        best: Literal["max", "min"] | None = None,
    ) -> None:
        # Names of states become names of files.
        wrong = [name for name in states if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name)]
        wrong += [name for name in (RANDOM, "states", "manifest") if name in states]
        if wrong:
            allowed = "named by letters, digits, '_', '-' and '.', and not 'random', 'states' or 'manifest'"
            raise OptionError("states", wrong[0], allowed)
        for option, count in (("every_steps", every_steps), ("every_epochs", every_epochs), ("keep", keep)):
            if count is not None and (type(count) is not int or count < 1):
                raise OptionError(option, count, "a whole number from 1 on, or None")
        if every_seconds is not None and not (is_number(every_seconds) and every_seconds > 0):
            raise OptionError("every_seconds", every_seconds, "a number of seconds above 0, or None")
        if best not in (None, "max", "min"):
            raise OptionError("best", best, "'max', 'min' or None")
        self.directory = Path(directory)
        self.values = {name: state for name, state in states.items() if kind_of(state) == "value"}
        self.metric: float | None = None
        self.step_number, self.epoch = 0, 0
        self._states = States({**states, RANDOM: RandomGenerators()})
        self._ranks = ranks or ranks_here()
        self._every = (every_steps, every_epochs, every_seconds)
        self._keep, self._best = keep, best
        self._background = BackgroundTask("duoka-checkpoint")
        self._memories: dict[str, Memory] = {}  # by file, for the next save
        self._lock: Lock | None = None
        self._restored = False
        self._saved_at = time.monotonic()
        self._hooked = False
        self._next_check, self._checked_at = 0, (0, time.monotonic())  # the first check is at the first step
        self._preemption = Preemption()
        for state in states.values():
            if callable(register := getattr(state, "register_step_hook", None)):
                self._hooked = True
                register(self._step)

    # The loop.

    def epochs(self, count: int) -> Iterator[int]:
        """Restore the newest checkpoint, then yield the indices of the remaining epochs, up to `count`.

        Saves at the end of an epoch as `every_epochs` says, and after the last. An epoch without a call of `step`
        counts as one step, unless a loader among the states counts them: the last checkpoint may be of its end.

        Raises:
            CheckpointError: as `restore` and `save`.
            Preempted: a signal asked this run to end, and it has saved.
        """
        self._preemption.install()
        try:
            if not self._restored:
                self.restore()
            while self.epoch < count:
                before = self.step_number
                this_process().began_epoch(self.epoch, count)
                yield self.epoch
                self.step_number += self.step_number == before and not self._hooked
                self.epoch += 1
                every = self._every[1]
                self._at_boundary(due=every is not None and (self.epoch % every == 0 or self.epoch == count))
            self.wait()
            self._preemption.end()
        finally:
            self._preemption.uninstall()

    def step(self) -> None:
        """Mark the end of a training step, and save if a save is due. All ranks must call this.

        Has no effect if one of the states is a loader that calls `step` for each batch.

        Raises:
            CheckpointError: the previous save, in the background, has failed.
            Preempted: a signal asked this run to end; a checkpoint has been saved.
        """
        if not self._hooked:
            self._step()

    def _step(self) -> None:
        self.step_number += 1
        every = self._every[0]
        due = every is not None and self.step_number % every == 0
        if due or self.step_number >= self._next_check:
            self._at_boundary(due)

    def _at_boundary(self, due: bool) -> None:
        """Let all ranks agree whether to save or to end."""
        seconds = self._every[2]
        late = seconds is not None and time.monotonic() - self._saved_at >= seconds
        # A signal may reach one rank only; the time is rank 0's.
        asked, late = self._any_rank(bool(self._preemption.asked), late and self._ranks.rank == 0)
        if asked:
            self.save()
            self.wait()
            raise self._preemption.exception()
        if due or late:
            self.save()

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Return for each flag if it is set on any rank. Raises an error of the background thread on every rank."""
        failure = self._background.pop_error()
        if self._ranks.world_size > 1:
            # All in one collective: this is called in the training loop.
            mine = [failure is not None, *flags, self._steps_to_next_check()]
            every = self._ranks.all_gather(torch.tensor(mine, dtype=torch.int64))
            failed, *anywhere = (bool(flag) for flag in every[:, :-1].amax(0))
            self._next_check = self.step_number + int(every[0, -1])  # rank 0's, as the ranks' clocks differ
            if failed:
                source = int(every[:, 0].nonzero().max())  # not rank 0 if another rank failed, too
                message = self._ranks.broadcast_object(failure and str(failure), source)
                failure = failure if self._ranks.rank == source else CheckpointError(message)
            flags = tuple(anywhere)
        try:
            if failure is not None:
                raise failure
            return list(flags)
        finally:
            failure = None  # break the reference cycle of the error and this frame

    def _steps_to_next_check(self) -> int:
        """Return the steps until ranks check for signals again; several times a second is enough.

        At most twice the previous number: the first steps may have been faster than later ones.
        """
        now, steps = time.monotonic(), self.step_number - self._checked_at[0]
        pause = CHECK_INTERVAL * steps / max(now - self._checked_at[1], 1e-6)
        self._checked_at = (self.step_number, now)
        return min(max(int(pause), 1), max(2 * steps, 1), 1000)

    # Saving.

    def save(self, metric: float | None = None) -> None:
        """Save now. All ranks must call this.

        Args:
            metric: of the current model; by default `self.metric`.

        Raises:
            CheckpointBusy: another run is writing into the directory.
            CheckpointError: a state cannot be saved; the directory holds checkpoints that were not restored; or the
                previous save has failed. Earlier checkpoints are unchanged.
        """
        self.wait()  # one save at a time: a slow disk would fill the memory with copies
        metric = self.metric if metric is None else metric
        if metric is not None and not is_number(metric):
            raise OptionError("metric", metric, "an int or float, and not NaN", "of a tensor, use .item()")
        on_first(self._ranks, self._prepare)
        self._states.objects |= self.values
        taken = together(self._ranks, self._states.to_saved, "saving", CheckpointError)
        # Made before the threads start: each rank opens its files in it, and looks whether all see one directory.
        draft = on_first(self._ranks, lambda: begin(self.directory, self.step_number))
        groups = [state.holders for state in taken.values() if state.holders is not None]
        shares = not groups or share_files(self._ranks, draft, any(map(are_first, groups)))
        together(self._ranks, lambda: self._start(taken, metric, draft, shares), "saving", CheckpointError)
        self.metric = None
        self._saved_at = time.monotonic()

    def _prepare(self) -> None:
        """On rank 0, before the first write: lock the directory."""
        self._lock_directory()
        if not self._restored and (earlier := directory.steps(self.directory)):
            raise CheckpointError(
                f"{self.directory} holds checkpoints of an earlier run ({earlier[-1].name}); go on from them by "
                "restore() or epochs(), or give another directory"
            )

    def _start(self, taken: Mapping[str, SavedState], metric: float | None, draft: Path, shares: bool) -> None:
        """On every rank: copy to memory what this rank writes, and start the thread that writes it into `draft`.

        shares: the ranks share files, so that each writes its own rows.
        """
        rank = self._ranks.rank
        try:
            snapshot = Snapshot(taken, self._memories, rank, shares)
        except BaseException as error:
            if rank == 0:
                disk.remove(draft)
            else:  # rank 0's thread may wait for this rank's mark already
                give_up(draft, rank, str(error))
            raise
        if rank:
            if snapshot.files:
                self._background.start(lambda: write_part(draft, snapshot, rank))
            return
        made = {
            "duoka": version("duoka"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "world_size": self._ranks.world_size,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        manifest = Manifest(self.step_number, self.epoch, snapshot.states, {}, made, metric)
        self._restored = True  # from now on the directory holds checkpoints of this run

        def work() -> None:
            write(draft, snapshot, manifest)
            this_process().saved(manifest.step)
            # Last: until the new one is on the disk, the old ones are all there is.
            directory.prune(self.directory, self._keep, self._best)

        self._background.start(work)

    def wait(self) -> None:
        """Wait until the last save is on the disk. All ranks must call this. Raises CheckpointError if it failed."""
        self._background.finish()
        self._any_rank()

    def best(self) -> Path | None:
        """Return the directory with the best metric, or None."""
        return directory.find_best(directory.steps(self.directory), self._best or "max")

    def _lock_directory(self) -> None:
        """On rank 0: lock the directory for writing, and remove partial files."""
        if self._lock is not None:
            return
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file; a checkpoint needs a directory")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.directory)
            disk.sweep(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be written: {error}") from error

    def close(self, wait: bool = True) -> None:
        """Wait for the last save, and release the lock on the directory.

        wait: also wait for the other ranks, which must all call this; errors are then raised on every rank.
        """
        try:
            if wait:
                self.wait()
        finally:
            self._background.finish()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # Going on.

    def restore(self) -> Position | None:
        """Restore the newest intact checkpoint. All ranks must call this.

        Every file is compared with its SHA-256. A damaged checkpoint is renamed to end in `.damaged`, with a warning,
        and the one before it is restored.

        Returns:
            The position of the restored checkpoint; None if the directory has no checkpoint.

        Raises:
            CheckpointBusy: another run is writing into the directory.
            CheckpointError: all checkpoints are damaged, or the saved states do not match the present ones.
            WeightsMismatch: a model has other tensors than the checkpoint.
        """
        self._background.finish()  # a save under way is the newest checkpoint
        newest = on_first(self._ranks, self._find)
        self._restored = True
        if newest is None:
            return None
        path, manifest = newest
        together(self._ranks, lambda: self._load(path, manifest.states), f"restoring {path}", CheckpointError)
        self.step_number, self.epoch = manifest.step, manifest.epoch
        this_process().saved(manifest.step)
        self._next_check, self._checked_at = 0, (manifest.step, time.monotonic())
        self._saved_at = time.monotonic()
        return Position(manifest.step, manifest.epoch, path)

    def _find(self) -> tuple[Path, Manifest] | None:
        """On rank 0: return the newest intact checkpoint."""
        self._lock_directory()
        damaged: dict[Path, str] = {}
        for path in reversed(directory.steps(self.directory)):
            try:
                manifest = directory.read(path)
                directory.check(path, manifest, manifest.files)
            except CheckpointDamaged as error:
                damaged[path] = str(error)
                continue
            for other, why in damaged.items():  # only now: where all are damaged, none is renamed
                warnings.warn(f"skipped a damaged checkpoint: {why}; using {path.name}", stacklevel=5)
                with suppress(OSError):
                    os.rename(other, other.with_name(other.name + ".damaged"))
            return path, manifest
        if damaged:
            causes = "; ".join(damaged.values())
            raise CheckpointError(
                f"all checkpoints in {self.directory} are damaged: {causes}; to start over, choose another directory"
            )
        return None

    def _load(self, path: Path, saved: Mapping[str, StateEntry]) -> None:
        here, there = set(self._states.objects), set(saved)
        if here - there:
            raise CheckpointError(
                f"{path} has no state {', '.join(map(repr, sorted(here - there)))}; it has {', '.join(sorted(there))}"
            )
        if there - here:
            warnings.warn(f"not restored from {path}: {', '.join(sorted(there - here))}", stacklevel=5)
        try:
            trees = directory.read_trees(path)
            for name in sorted(here, key=lambda name: name == RANDOM):  # last: restoring may draw random numbers
                kind, entry = self._states.kinds[name], saved[name]
                if kind != entry.kind:
                    raise CheckpointError(f"{name!r} is of kind {kind}, but was saved as {entry.kind} in {path}")
                if kind == "model" and TREES not in entry.files:
                    load_weights(self._states.objects[name], path / entry.files[0])
                    continue
                files = [file for file in entry.files if file.endswith(".safetensors")]
                tensors = {at: stored for file in files for at, stored in safetensors.read(path / file).tree.items()}
                value = self._states.restore(name, trees.get(name), tensors)
                if kind == "value":
                    self.values[name] = value
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> Checkpoint:
        self._preemption.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(wait=kind is None)
            if kind is None:
                self._preemption.end()
        finally:
            self._preemption.uninstall()


# Signals that ask a run to end, as of a preempted node or the end of a time slice.

AGAIN = 75  # exit code for "start me again": EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """This run was asked to end and has saved. Exit code 75; when started again, the run continues."""

    def __init__(self) -> None:
        super().__init__(AGAIN)


class Preemption:
    """Records the signals that ask this process to end. asked: the number of the first one; 0 before."""

    def __init__(self) -> None:
        self.asked = 0
        self._is_ending = False
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers; does nothing outside of the main thread."""
        with suppress(ValueError):  # Python's error in another thread
            for number in SIGNALS:
                # `epochs` within `with saved:` installs them twice: the handlers of the script are the first ones.
                self._before.setdefault(number, signal.signal(number, self._note))

    def exception(self) -> Preempted:
        """Return the exception to raise after saving. Further signals then no longer interrupt the exit."""
        self._is_ending = True
        return Preempted()

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        while self._before:
            number, before = self._before.popitem()
            # A second signal must not kill a process that has saved and is about to exit with code 75.
            if not (self._is_ending and before is signal.SIG_DFL):
                signal.signal(number, before)

    def end(self) -> None:
        """Restore the previous handlers after the loop has ended, and raise again a signal that came too late."""
        self.uninstall()
        if self.asked and not self._is_ending:
            number, self.asked = self.asked, 0
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
