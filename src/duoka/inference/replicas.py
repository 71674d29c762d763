"""Copies of a model on devices, and the threads that compute batches with them.

Threads are used for GPUs and CPUs: torch releases the GIL while it computes. A fork of a program that has computed
can hang in the libraries that torch uses, and new processes would each import torch and copy the model.
"""

from __future__ import annotations

import copy
import gc
import inspect
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from duoka.errors import AskedError, RunError, TimedOut
from duoka.hardware.vendors import FAULTS
from duoka.inference.batches import Batch, each_leaf, slice_rows, split_rows
from duoka.private.texts import NO_MEMORY, says
from duoka.system.libc import raise_in_thread
from duoka.view.tensor.batch import gather_all

STOP_LIMIT = 2.0  # seconds for threads to return from their current operation
STEP = 0.1  # seconds before threads are interrupted, and between interrupts
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Calling = Callable[[nn.Module, Any], Any]


class Replica:
    """A model on one device. Computes batches in eval and inference mode, and restores the modes."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        calling: Calling,
        precision: torch.dtype | None,
        keep: bool,
        share_out: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.model, self.device = model, device
        self.calling = calling  # calls the model with a batch
        self.precision = precision  # type of autocast
        self.keep = keep  # leave outputs on the device
        # Converts a tensor with a row for each item to a batch tensor, of which each rank computes its rows.
        self.share_out = share_out
        self.most: int | None = None  # rows that fit into memory at once, after it has run out

    def compute(self, batch: Batch) -> Batch:
        """Set the outputs of a batch, or its error, unless it could not be read; return it."""
        if batch.error is None:
            batch.device = str(self.device)
            try:
                batch.outputs = self._outputs(batch.content, batch.rows)
            except Exception as error:
                batch.error = error
        return batch

    def _outputs(self, content: Any, rows: int | None) -> list[Any]:
        """Return the output for each row. When memory runs out, halve the batch, this and later ones."""
        if rows is None:
            return self._call(content, None)
        outputs: list[Any] = []
        while len(outputs) < rows:
            start = len(outputs)
            stop = min(rows, start + (self.most or rows))
            try:
                outputs += self._call(slice_rows(content, start, stop, rows), stop - start)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or stop - start == 1:
                    raise
            self.most = (stop - start + 1) // 2
            gc.collect()  # outside `except`, so that the error's frames do not hold memory
            if self.device.type != "cpu":
                torch.accelerator.empty_cache()
        return outputs

    def _call(self, content: Any, rows: int | None) -> list[Any]:
        def move(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            here = leaf.to(self.device, non_blocking=True)
            return self.share_out(here) if self.share_out and here.shape[:1] == (rows,) else here

        kind, precision = self.device.type, self.precision
        autocast = nullcontext() if precision is None else torch.autocast(kind, precision)
        # Kernels of extensions run on the current GPU, whatever device their arguments are on.
        current = nullcontext() if kind == "cpu" else torch.accelerator.device_index(self.device.index)
        with torch.inference_mode(), evaluating(self.model), autocast, current:
            output = gather_all(self.calling(self.model, each_leaf(move, content)))
            if not self.keep:
                output = each_leaf(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, output)
            return split_rows(output, rows)


def calling(model: nn.Module, inputs: Callable[[Any], Any] | None = None) -> Calling:
    """Return a function that calls a model with a batch, by the signature of `forward`.

    A dict becomes keyword arguments if forward takes these names. Of a tuple or list, forward gets as many items as
    it needs, so labels after the inputs are dropped; another number of items raises an AskedError. `inputs`, a
    function from a batch to the arguments, overrides this.
    """
    needed, most, names = 0, None, None  # of positional arguments, and of those by name; None: unlimited
    with suppress(TypeError, ValueError):  # there is no signature
        parameters = inspect.signature(model.forward).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
        needed = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
        most = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
        names = None if inspect.Parameter.VAR_KEYWORD in kinds else {parameter.name for parameter in parameters}

    def call(model: nn.Module, batch: Any) -> Any:
        if inputs is not None:
            chosen = inputs(batch)
            if isinstance(chosen, Mapping):
                return model(**chosen)
            return model(*chosen) if isinstance(chosen, tuple) else model(chosen)
        if isinstance(batch, Mapping):
            return model(**batch) if names is None or set(batch) <= names else model(batch)
        if isinstance(batch, (tuple, list)) and not all(isinstance(part, (str, bytes)) for part in batch):
            if len(batch) == needed or most is None:
                return model(*batch)
            if len(batch) > needed == most:
                return model(*batch[:needed])
            takes = f"{needed}" if needed == most else f"{needed} to {most}"
            raise AskedError(
                f"a batch has {len(batch)} parts, and forward takes {takes}; say which it gets, "
                "for example inputs=lambda batch: batch[0]"
            )
        return model(batch)

    return call


def replicate(model: nn.Module, device: torch.device, share_buffers: bool) -> nn.Module:
    """Copy a model to `device`. Parameters that are there already are shared, and the model is not modified.

    share_buffers: the copy may share buffers; False if several copies compute at the same time. Raises AskedError if
    the model cannot be copied.
    """
    memo: dict[int, Any] = {}  # what deepcopy takes instead of copying: no device holds two models meanwhile
    for parameter in model.parameters():
        if parameter.device != device:
            memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), requires_grad=False)
        else:
            memo[id(parameter)] = parameter
    for buffer in model.buffers():
        if buffer.device != device or share_buffers:
            memo[id(buffer)] = buffer.detach().to(device)
    try:
        return copy.deepcopy(model, memo).to(device)
    except (RuntimeError, TypeError) as error:
        raise AskedError(f"predict on several devices needs a model that copy.deepcopy can copy: {error}") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode; afterwards restore each module's mode."""
    # By the attribute: classes override train() and eval(), and a script may keep some modules in eval mode.
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def is_fatal(error: BaseException) -> bool:
    """Return True if the device cannot compute any more in this process after this error."""
    if is_out_of_memory(error):
        return False
    is_fault = isinstance(error, RuntimeError) and re.search(FAULTS, str(error)) is not None
    return is_fault or isinstance(error, torch.AcceleratorError)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a smaller batch may succeed."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or says(error, *NO_MEMORY)


class ThreadPool:
    """A thread for each device, which takes the next batch; also for one device, while the next batch is read.

    timeout: seconds without any result after which a device counts as hung. cores: CPU threads of each device, for
    CPUs; None for torch's default.
    """

    def __init__(self, replicas: Sequence[Replica], timeout: float, cores: int | None) -> None:
        self._timeout, self._cores, self._cores_before = timeout, cores, torch.get_num_threads()
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()  # None: the pool is closed
        self._outbox: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._alive = len(replicas)  # devices that have not failed
        self._closed = False
        self._computing: dict[threading.Thread, Batch] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(replica,), name=f"duoka-predict-{replica.device}", daemon=True)
            for replica in replicas
        ]
        for thread in self._threads:
            thread.start()

    def computed(self, source: Iterator[Batch], window: int) -> Iterator[Batch]:
        """Yield the batches of `source`, computed, in order. At most `window` of them are read ahead.

        Raises RunError if no device is left, TimedOut if no batch was finished in time.
        """
        ahead: deque[Batch] = deque()
        for batch in chain(source, repeat(None)):
            if batch is not None:
                ahead.append(batch)
                batch.is_finished = batch.error is not None  # it could not be read
                if not batch.is_finished:
                    self._inbox.put(batch)
            elif not ahead:
                return
            must_wait = batch is None or len(ahead) == window
            while not self._outbox.empty() or (must_wait and not ahead[0].is_finished):
                self._receive()
            if ahead[0].is_finished:
                yield ahead.popleft()

    def _receive(self) -> None:
        """Wait for the next batch that is computed. That of a device that failed goes to another."""
        try:
            batch = self._outbox.get(timeout=self._timeout)
        except queue.Empty:
            had = ", ".join(
                f"{batch.device} computes the batch that begins with item {batch.indices.start:,}"
                for batch in self._computing.copy().values()
            )
            raise TimedOut(f"no batch was finished in {self._timeout:g} s; {had}") from None
        batch.is_finished = True
        if batch.error is not None and is_fatal(batch.error):
            self._alive -= 1
            if not self._alive:
                raise RunError(f"no device is left: {batch.device} was the last, and failed with: {batch.error}")
            if not batch.has_failed_device:  # else the batch itself makes devices fail
                batch.has_failed_device, batch.is_finished, batch.error = True, False, None
                self._inbox.put(batch)

    def _run(self, replica: Replica) -> None:
        with suppress(SystemExit):  # of `close`
            if self._cores is not None:
                torch.set_num_threads(self._cores)
            is_sound = True
            while is_sound and (batch := self._inbox.get()) is not None and not self._closed:
                self._computing[threading.current_thread()] = batch  # for messages, and for `close`
                replica.compute(batch)
                del self._computing[threading.current_thread()]
                is_sound = batch.error is None or not is_fatal(batch.error)  # before another thread has the batch
                self._outbox.put(batch)

    def close(self) -> None:
        """Stop all work, without waiting for batches under way."""
        self._closed = True
        for _ in self._threads:
            self._inbox.put(None)
        deadline = time.monotonic() + STOP_LIMIT
        # Python must not exit while a thread is inside torch.
        while (alive := [thread for thread in self._threads if thread.is_alive()]) and time.monotonic() < deadline:
            alive[0].join(STEP)
            for thread in self._computing.copy():  # the others end by themselves
                if thread.is_alive() and thread.ident is not None:
                    # Repeated, as Python may drop it; where the second comes when the thread is ending, Python shows
                    # no traceback of a SystemExit.
                    raise_in_thread(thread.ident, SystemExit)
        if self._cores is not None:
            torch.set_num_threads(self._cores_before)  # a thread's setting also applies to new threads
