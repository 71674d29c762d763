"""`duoka.predict`: a model's outputs for all items of a data set, computed on every device, in order."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from duoka.errors import AskedError, BatchFailed, DuokaError, OptionError
from duoka.hardware.inventory import cores
from duoka.inference.batches import Batch, batches, stack
from duoka.inference.replicas import Replica, ThreadPool, calling, replicate
from duoka.origins.process import this_process
from duoka.planning.options import one_of
from duoka.planning.picking import Picked
from duoka.planning.picking import devices as pick_devices
from duoka.private.torch import is_dtensor
from duoka.sharding.parameter import Sharded
from duoka.supervision import tracebacks

OnError = Literal["raise", "collect"]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Computed = Generator[Batch, None, None]
WINDOW = 4  # batches for each device that are read and not yet yielded


class JobRanks(Protocol):
    """The ranks of a job, as one of them sees them."""

    rank: int
    world_size: int

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, which must be picklable, in the order of ranks. A collective call."""
        ...


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
    ranks: JobRanks | Literal["run"] | None = "run",
) -> Predictions:
    """Compute a model's outputs on every device; yields one output for each item, in the order of the data.

    A faster device computes more batches. A bounded number of batches is read ahead, whatever the length of the data.
    The model is put into eval and inference mode for each batch and restored after it; its weights are copied once to
    each device. Outputs are inference tensors: `clone()` one to compute gradients with it. With a model of strategy
    "fsdp" all ranks call this with the same data: they compute each batch together, each its rows, and all get all
    outputs.

    Args:
        model: not modified or moved.
        data: a dataset, a DataLoader, an iterable or generator of items, or a tensor, array or dict of tensors whose
            first dimension is the items.
        devices: in the syntax of `--devices`, or a list of torch devices.
        batch_size: items per batch; None if each item of `data` is a batch already. Ignored for a DataLoader.
        inputs: maps a batch to the model's arguments: a tuple is passed as positional arguments, a dict by name. By
            default a dict is passed by name, and of a tuple as many items as forward takes.
        precision: fp32 runs the model as it is; bf16 and fp16 run it under autocast.
        outputs: "cpu" copies outputs to the CPU; "device" leaves each on its device.
        on_error: "raise" stops at the first batch that fails; "collect" yields a BatchFailed for each of its items.
        timeout: seconds without any result after which a device counts as hung.
        ranks: the ranks of a job, which divide the batches; all call this with the same data, consume as many
            outputs, and get all outputs. "run": the ranks of this process's open run, whose device is then the
            default. None: this process computes everything.

    Raises:
        BatchFailed: a batch could not be read or computed.
        DeviceError: a device does not exist.
        OptionError: an argument has an invalid value.
        RunError: the last device failed.
        TimedOut: no batch was finished in `timeout` seconds.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a torch.nn.Module")
    if any(map(is_dtensor, model.parameters())):
        hint = "shard it by run.model(net, strategy='fsdp'), or save it and load it into a model that is whole"
        raise OptionError("model", f"{type(model).__name__} of DTensors", "a model without torch's DTensors", hint)
    one_of("precision", precision, PRECISIONS)
    one_of("outputs", outputs, ("cpu", "device"))
    one_of("on_error", on_error, get_args(OnError))
    if ranks == "run":
        run = this_process().run
        ranks = run if run is not None and run.world_size > 1 else None
        devices = [run.device] if run is not None and devices == "auto" else devices
    if ranks is not None and outputs == "device":
        raise OptionError("outputs", "device", "cpu where ranks share the work", "ranks=None computes all in each")
    part = next((parameter for parameter in model.parameters() if isinstance(parameter, Sharded)), None)
    if part is not None:  # all ranks compute each batch together
        ranks, devices = None, [part.device]
    source = batches(data, batch_size, (0, 1) if ranks is None else (ranks.rank, ranks.world_size))
    if not devices:
        raise OptionError("devices", devices, "a list of at least one device, or a text as for --devices")
    picked = pick_devices(devices) if isinstance(devices, str) else Picked(torch.device(device) for device in devices)
    call = calling(model, inputs)

    def replica(copy: nn.Module, device: torch.device, share_out: Any = None) -> Replica:
        return Replica(copy, device, call, PRECISIONS[precision], outputs == "device", share_out)

    def computed() -> Computed:
        on_cpu = {parameter.device for parameter in model.parameters()} <= {torch.device("cpu")}
        if part is not None:
            run = this_process().run  # a plain script's model shares out what it is given
            yield from map(replica(model, part.device, run.batch if run is not None else None).compute, source)
        elif len(picked) == 1 and picked[0].type == "cpu" and on_cpu:  # in this thread, without a copy
            yield from map(replica(model, picked[0]).compute, source)
        else:
            copies = [replicate(model, device, share_buffers=len(picked) == 1) for device in picked]
            cpus = sum(device.type == "cpu" for device in picked)
            threads = max(1, cores() // cpus) if cpus > 1 else None  # copies on CPUs share the cores
            with closing(ThreadPool(list(map(replica, copies, picked)), timeout, threads)) as pool:
                yield from pool.computed(source, WINDOW * len(picked))

    return Predictions(computed(), on_error, picked.release, ranks)


class Predictions(Iterator[Any]):
    """An iterator of outputs, one for each item, in order. Work begins with the first `next`.

    failures: the batches that failed, with on_error="collect".
    """

    def __init__(
        self,
        computed: Computed,
        on_error: OnError,
        release: Callable[[], None],
        ranks: JobRanks | None,
    ) -> None:
        self.failures: list[BatchFailed] = []
        outputs = _outputs(computed, self.failures if on_error == "collect" else None, release)
        self._outputs = chain.from_iterable(outputs if ranks is None else _gathered(outputs, ranks))
        self._end = weakref.finalize(self, outputs.close)  # also at interpreter exit

    def __next__(self) -> Any:
        return next(self._outputs)

    def stack(self) -> Any:
        """Stack all remaining outputs along a new first dimension.

        Raises:
            BatchFailed: a batch failed and was collected.
            OptionError: there are no outputs, or they differ in shape.
        """
        outputs = list(self)
        failed = next((output for output in outputs if isinstance(output, BatchFailed)), None)
        if failed is not None:
            raise failed
        if not outputs:
            raise OptionError("data", "empty", "at least one item to stack")
        return stack(outputs)

    def close(self) -> None:
        """Stop the work."""
        self._end()


def _outputs(
    computed: Computed, failures: list[BatchFailed] | None, release: Callable[[], None]
) -> Generator[list[Any], None, None]:
    """Yield the outputs of each batch.

    failures: collects errors; None raises them. release: called at the end.
    """
    try:
        for batch in computed:
            yield batch.outputs if batch.error is None else _failed(batch, batch.error, failures)
    finally:
        computed.close()  # stops the threads
        release()


def _failed(batch: Batch, error: Exception, failures: list[BatchFailed] | None) -> list[Any]:
    """Return a BatchFailed for each item of a batch if failures are collected, else raise it."""
    if isinstance(error, AskedError):  # an error in the call, which every batch would raise
        raise error
    failure = BatchFailed(batch.indices, batch.device, tracebacks.headline(error))
    if failures is None:
        raise failure from error
    failure.__cause__ = error
    failures.append(failure)
    return [failure] * len(batch.indices)


def _gathered(outputs: Iterator[list[Any]], ranks: JobRanks) -> Iterator[list[Any]]:
    """Yield the outputs of all ranks' batches in order, gathered in rounds of a batch for each rank.

    Raises a DuokaError of any rank on every rank, so that none waits for it.
    """
    while True:
        outcome: list[Any] | DuokaError | None
        try:
            outcome = next(outputs, None)
        except DuokaError as error:
            outcome = error
        file = io.BytesIO()
        torch.save(outcome, file)  # pickle would write the whole batch for each row, as rows are views of it
        gathered = ranks.gather_objects(file.getvalue())
        outcomes = [torch.load(io.BytesIO(data), weights_only=False) for data in gathered]  # sent by this program
        for outcome in outcomes:
            if isinstance(outcome, DuokaError):
                raise outcome
        if all(outcome is None for outcome in outcomes):
            return
        yield from (outcome for outcome in outcomes if outcome is not None)
