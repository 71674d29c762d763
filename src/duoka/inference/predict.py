"""`duoka.predict`: a model's outputs for all items of some data, computed by every device, in their order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import nn

from duoka import traces
from duoka.devices.inventory import cores
from duoka.errors import AskedError, BatchFailed, OptionError
from duoka.inference import rows
from duoka.inference.calling import Calling
from duoka.inference.crew import Alone, Crew, Result, Threads
from duoka.inference.replica import Replica, replicate
from duoka.inference.sharing import Ranks, shared
from duoka.inference.sources import Batch, batches
from duoka.options import one_of
from duoka.picking import Picked
from duoka.picking import devices as pick_devices
from duoka.process import this_process
from duoka.view.parts import holds_shards

OnError = Literal["raise", "collect"]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW = 4  # batches for each device that are read and not yet handed out


def predict(
    model: nn.Module,
    data: Any,
    *,
    devices: str | Sequence[torch.device | str] = "auto",
    batch_size: int | None = 32,
    inputs: Callable[[Any], Any] | None = None,
    precision: str = "fp32",
    outputs: Literal["cpu", "device"] = "cpu",
    on_error: OnError = "raise",
    timeout: float = 600.0,
    ranks: Ranks | Literal["run"] | None = "run",
) -> Predictions:
    """Compute a model's outputs over every device, in the order of the data: one for each item.

    A device that is faster takes more batches. Some batches are read ahead, as many as a small window holds,
    whatever the length of the data. The model is put into eval and inference mode for each batch and is as before
    between them; its weights are copied once to each device. Outputs were made in inference mode: `clone()` one
    to compute gradients with it.

    Args:
        model: stays where it is.
        data: a dataset, a DataLoader, an iterable or generator of items, a tensor or array or dict of tensors by
            rows.
        devices: in the words of `--devices`, or a list of torch devices.
        batch_size: items that go through the model together; None where each item of `data` is a batch already.
            A DataLoader brings its own.
        inputs: from a batch to what the model gets: a tuple is given as arguments, a dict by name. Without it a
            dict is given by name, and of a tuple as many parts as forward takes.
        precision: fp32 leaves the model as it is; bf16 and fp16 compute under autocast.
        outputs: cpu brings them there; device leaves each where it was computed.
        on_error: raise ends it at the first batch that fails; collect hands out a BatchFailed for each of its
            items.
        timeout: seconds without any result after which a device is taken to hang.
        ranks: those of a job, which share the batches out; all of them call this with the same data, and take as
            many outputs. Every one of them has all outputs. "run": those of the run that this process has open;
            its device is what "auto" then means. None: this process computes all of it.

    Raises:
        BatchFailed: a batch could not be computed or read, and which.
        DeviceError: a device is not there.
        OptionError: an argument has a value that it does not take.
        RunError: the last device died.
        TimedOut: nothing was finished in `timeout` seconds.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a torch.nn.Module")
    if holds_shards(model):
        hint = "call it on the batches of a run.loader, or save it and load it into a model that is whole"
        raise OptionError("model", f"a sharded {type(model).__name__}", "a model that each process holds whole", hint)
    one_of("precision", precision, PRECISIONS)
    one_of("outputs", outputs, ("cpu", "device"))
    one_of("on_error", on_error, get_args(OnError))
    if ranks == "run":
        run = this_process().run
        ranks = run if run is not None and run.world_size > 1 else None
        devices = [run.device] if run is not None and devices == "auto" else devices
    if ranks is not None and outputs == "device":
        raise OptionError("outputs", "device", "cpu where ranks share the work", "ranks=None computes all in each")
    source = batches(data, batch_size, (0, 1) if ranks is None else (ranks.rank, ranks.world_size))
    if not devices:
        raise OptionError("devices", devices, "at least one device")
    picked = pick_devices(devices) if isinstance(devices, str) else Picked(torch.device(device) for device in devices)
    calling = Calling(model, inputs)

    def crew() -> Crew:
        return _crew(model, picked, calling, PRECISIONS[precision], outputs == "device", timeout)

    return Predictions(source, crew, WINDOW * len(picked), on_error, picked.release, ranks)


class Predictions(Iterator[Any]):
    """Outputs as they are asked for, one for each item, in order. Work begins with the first.

    failures: the batches that failed, where they are collected.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        crew: Callable[[], Crew],
        window: int,
        on_error: OnError,
        release: Callable[[], None],
        ranks: Ranks | None,
    ) -> None:
        self.failures: list[BatchFailed] = []
        handle = partial(_failed, self.failures if on_error == "collect" else None)
        mine = _in_order(source, crew, window, handle, release)
        self._outputs = chain.from_iterable(mine if ranks is None else shared(mine, ranks))
        self._end = weakref.finalize(self, mine.close)  # also at the end of the program

    def __next__(self) -> Any:
        return next(self._outputs)

    def stack(self) -> Any:
        """All that is left, as one structure: tensors stacked along a new first dimension.

        Raises:
            BatchFailed: a batch failed and was collected.
            OptionError: there is nothing to stack, or outputs differ in shape.
        """
        outputs = list(self)
        failed = next((output for output in outputs if isinstance(output, BatchFailed)), None)
        if failed is not None:
            raise failed
        if not outputs:
            raise OptionError("data", "empty", "at least one item to stack")
        return rows.stack(outputs)

    def close(self) -> None:
        """End the work."""
        self._end()


def _in_order(
    source: Iterator[Batch],
    make_crew: Callable[[], Crew],
    window: int,
    failed: Callable[[Result], list[Any]],
    release: Callable[[], None],
) -> Generator[list[Any], None, None]:
    """Keep the crew at work, and hand its outputs out, batch by batch, in their order; errors, too, in their turn.

    failed: what is handed out for a batch that failed, if anything is. release: called at the end.
    """
    finished: dict[int, Result] = {}
    given = handed_out = 0
    more = True
    with ExitStack() as ending:
        ending.callback(release)
        crew = make_crew()
        ending.callback(crew.close)
        while True:
            while more and given - handed_out < window and crew.has_room():
                batch = next(source, None)
                if batch is None:
                    more = False
                    break
                given += 1
                if batch.error is not None:
                    finished[batch.number] = Result(batch, "the data", error=batch.error)
                else:
                    crew.give(batch)
            if handed_out in finished:
                result = finished.pop(handed_out)
                yield result.outputs if result.error is None else failed(result)
                handed_out += 1
            elif handed_out < given:
                result = crew.take()
                finished[result.batch.number] = result
            else:
                return


def _failed(collected: list[BatchFailed] | None, result: Result) -> list[Any]:
    """What stands in the places of a batch's items where failures are collected; elsewhere it is raised."""
    assert result.error is not None
    if isinstance(result.error, AskedError):  # no batch could go through
        raise result.error
    failure = BatchFailed(result.batch.indices, result.device, traces.headline(result.error))
    if collected is None:
        raise failure from result.error
    failure.__cause__ = result.error
    collected.append(failure)
    return [failure] * len(result.batch.indices)


def _crew(
    model: nn.Module,
    devices: Sequence[torch.device],
    calling: Calling,
    precision: torch.dtype | None,
    keep: bool,
    timeout: float,
) -> Crew:
    here = {parameter.device for parameter in model.parameters()} <= {torch.device("cpu")}
    if len(devices) == 1 and devices[0].type == "cpu" and here:
        return Alone(Replica(model, devices[0], calling, precision, keep))
    alone = len(devices) == 1
    replicas = [
        Replica(replicate(model, device, share_buffers=alone), device, calling, precision, keep) for device in devices
    ]
    cpus = sum(device.type == "cpu" for device in devices)
    return Threads(replicas, timeout, max(1, cores() // cpus) if cpus > 1 else None)
