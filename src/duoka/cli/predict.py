"""`duoka predict`: write a model's outputs for all items of some data to a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.cli.script_command import DEFAULTS, PATH, option
from duoka.engines import refuse_copies
from duoka.errors import MISSING, BatchFailed, OptionError
from duoka.supervision import tracebacks
from duoka.system.messages import say

if TYPE_CHECKING:
    from duoka.inference.files import Writer
    from duoka.inference.predict import Predictions

HELP = """\
Compute the outputs of MODEL on all devices, for every row of a .npy file, or every file of a folder in the order of
their names, and write them in that order.

MODEL is module:name: a torch.nn.Module, or a function that returns one.

The output gets its name when it is complete. --resume continues an interrupted run.
"""
EXAMPLE = "Example:  duoka predict nets:make --weights net.pt --data images.npy --out predictions.npy --devices 0,3"
STRATEGY = (
    "fsdp: each device holds a part of the model, for models larger than one. [default: each holds a copy of it]"
)


@dataclass(frozen=True)
class PredictRequest:
    """What to compute: the options of the command, as typed."""

    model: str
    weights: Path | None
    data: Path
    batch_size: int
    precision: str
    read: str | None


def predict(**asked: Any) -> Callable[[], int]:
    """Return the function that predicts; it runs outside of click, which must not handle the model's errors."""
    return partial(_predict, **asked)


def _predict(
    out: Path, devices: str, resume: bool, wait: str | None, strategy: str | None, batch_size: int, **asked: Any
) -> int:
    from duoka.inference.files import open_data, writer  # imports torch

    refuse_copies("duoka predict")
    request = PredictRequest(batch_size=batch_size, **asked)
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number from 1")
    if request.weights is not None and not request.weights.exists():
        raise OptionError("--weights", str(request.weights), "an existing file")
    if strategy not in (None, "fsdp"):
        hint = "without it, each device computes with a copy of the model"
        raise OptionError("--strategy", strategy, "fsdp, or left out", hint)
    # All is checked before the model is imported. To count items any reader will do: --read is imported later, too.
    count = len(open_data(request.data, None if request.read is None else Path))
    facts = {
        **{name: getattr(request, name) for name in ("model", "read", "precision")},
        **{name: _stamp(getattr(request, name)) for name in ("weights", "data")},
    }
    compute = _compute_together if strategy == "fsdp" else _compute
    with closing(writer(out, count, facts, resume)) as output:
        return compute(request, output, devices, wait or 0)


def _compute(request: PredictRequest, output: Writer, devices: str, wait: str | float) -> int:
    """Compute with a copy of the model on each device."""
    from duoka.inference.predict import predict as start
    from duoka.planning.picking import devices as pick_devices

    net, items = _model_and_items(request)
    _load(net, request.weights, say)
    with pick_devices(devices, wait=wait) as picked:
        for why in picked.why:
            say(why)
        rest, size = items[output.done :], request.batch_size
        predictions = start(net, rest, devices=picked, batch_size=size, precision=request.precision)
        return _fill(output, predictions, size)


def _compute_together(request: PredictRequest, output: Writer, devices: str, wait: str | float) -> int:
    """Compute each batch on all devices, each of which holds a part of the model, in a worker for each."""
    from duoka.launchers.function import launch

    try:
        codes = launch(partial(_compute_on_rank, request, output), devices=devices, wait=wait)
    except KeyboardInterrupt:
        return 130
    return int(codes[0])


def _compute_on_rank(request: PredictRequest, output: Writer) -> int:
    from duoka.inference.predict import predict as start
    from duoka.run import start as begin

    run = begin()
    net, items = _model_and_items(request)
    if request.weights is None and any(tensor.is_meta for tensor in net.state_dict().values()):
        raise OptionError("--weights", MISSING, "given for a model on the meta device, which has no values")
    net = run.model(net, strategy="fsdp")
    _load(net, request.weights, say if run.is_first else lambda text: None)
    begun, size = output.done, request.batch_size
    predictions = start(net, items[begun:], batch_size=size, precision=request.precision)
    if run.is_first:  # all ranks get all outputs, and take part in each
        return _fill(output, predictions, size)
    try:
        for _ in predictions:
            pass
    except BatchFailed as error:
        raise _in_all_data(error, begun) from error
    return 0


def _model_and_items(request: PredictRequest) -> tuple[Any, Any]:
    from duoka.inference.files import check_kind, import_name, model_named, open_data

    items = open_data(request.data, None if request.read is None else import_name("--read", request.read))
    net = model_named(request.model)
    check_kind(items, request.data, net)
    return net, items


def _load(net: Any, weights: Path | None, tell: Callable[[str], None]) -> None:
    from duoka.checkpoint.loading import load_weights

    if weights is not None:
        tell(str(load_weights(net, weights)))


def _fill(output: Writer, predictions: Predictions, batch_size: int) -> int:
    """Write all predictions; on an interruption or error keep what is written, to be resumed."""
    begin = output.done

    def left() -> str:
        output.keep()
        return f"{output.done:,} of {output.total:,} outputs are in {output.part}; --resume goes on"

    try:
        with click.progressbar(length=output.total, file=sys.stderr, show_pos=True) as bar:
            bar.update(output.done)
            while batch := list(islice(predictions, batch_size)):
                output.write(batch)
                bar.update(len(batch))
    except KeyboardInterrupt:
        print(f"\nduoka: interrupted{f'; {left()}' if output.done else ''}", file=sys.stderr)
        return 130
    except BatchFailed as error:  # of the model or the data: its traceback is what the user needs
        print(tracebacks.shown(error.__cause__ or error), end="", file=sys.stderr)
        if output.done:
            say(left())
        raise _in_all_data(error, begin) from error
    output.finish()
    return 0


def _in_all_data(error: BatchFailed, begin: int) -> BatchFailed:
    """Return an error whose items are counted from the beginning of the data, of which `begin` were left out."""
    indices = range(begin + error.indices.start, begin + error.indices.stop)
    return BatchFailed(indices, error.device, error.reason)


def _stamp(path: Path | None) -> list[Any] | None:
    """Identify a file, or a folder's files, by names, sizes and times: hashing the contents would take long."""
    if path is None or not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [str(path.absolute()), hashlib.sha256(repr(stamps).encode()).hexdigest()]


class PredictCommand(click.Command):
    """Accepts --wait without a time."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default time."""
        return super().parse_args(ctx, [f"{word}={DEFAULTS[word]}" if word in DEFAULTS else word for word in args])


command = PredictCommand(
    "predict",
    callback=predict,
    help=HELP,
    epilog=EXAMPLE,
    params=[
        click.Argument(["model"]),
        option("--weights", "FILE", "Of any format. [default: none]", kind=PATH),
        click.Option(["--data"], type=PATH, required=True, metavar="PATH", help="Each row or file is an item."),
        click.Option(["--out"], type=PATH, required=True, metavar="FILE", help="predictions.npy or .jsonl"),
        option("--devices", "DEVICES", "As for `duoka run`. [default: auto]", "auto"),
        option("--wait", "[=TIME]", "Queue until the devices are free, for at most TIME: --wait=30m."),
        option("--strategy", "fsdp", STRATEGY),
        option("--batch-size", "N", "[default: 32]", 32, int),
        option("--precision", "fp32|bf16|fp16", "[default: fp32]", "fp32"),
        option("--read", "MODULE:NAME", "A function that reads a file, given its path, as an item."),
        option("--resume", text="Continue after the last batch that was written."),
    ],
)
