"""`duoka predict`: write a model's outputs for all items of some data to a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka.engines import refuse_copies
from duoka.errors import BatchFailed, OptionError
from duoka.supervision import tracebacks
from duoka.system.messages import say

if TYPE_CHECKING:
    from duoka.inference.predict import Predictions
    from duoka.inference.writing import Writer

HELP = """\
Compute the outputs of MODEL on all devices, for every row of a .npy file, or every file of a folder in the order of
their names, and write them in that order.

MODEL is module:name: a torch.nn.Module, or a function that returns one.

The output gets its name when it is complete. --resume continues an interrupted run.
"""
EXAMPLE = "Example:  duoka predict nets:make --weights net.pt --data images.npy --out predictions.npy --devices 0,3"
FILE = click.Path(path_type=Path)
LONGEST_WAIT = "720h"


def predict(**asked: Any) -> Callable[[], int]:
    """Return the function that predicts; it runs outside of click, which must not handle the model's errors."""
    return partial(_predict, **asked)


def _predict(
    model: str,
    weights: Path | None,
    data: Path,
    out: Path,
    devices: str,
    batch_size: int,
    precision: str,
    read: str | None,
    resume: bool,
    wait: str | None,
) -> int:
    from duoka.checkpoint.loading import load_weights
    from duoka.inference.loading import check_kind, import_name, model_named, open_data
    from duoka.inference.predict import predict as start
    from duoka.inference.writing import writer
    from duoka.picking import devices as pick_devices

    refuse_copies("duoka predict")
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number from 1")
    if weights is not None and not weights.exists():
        raise OptionError("--weights", str(weights), "an existing file")
    items = open_data(data, None if read is None else import_name("--read", read))
    made_of = {"weights": _stamp(weights), "data": _stamp(data)}
    output = writer(out, len(items), {"model": model, "read": read, "precision": precision, **made_of}, resume)
    net = model_named(model)
    check_kind(items, data, net)
    if weights is not None:
        say(str(load_weights(net, weights)))
    with closing(output), pick_devices(devices, wait=wait or 0) as picked:
        for why in picked.why:
            say(why)
        rest = items[output.done :]
        predictions = start(net, rest, devices=picked, batch_size=batch_size, precision=precision)
        return _fill(output, predictions, batch_size)


def _fill(output: Writer, predictions: Predictions, batch_size: int) -> int:
    """Write all predictions; on an interruption or error keep what is written, to be resumed."""
    begin = output.done
    try:
        _write(predictions, output, batch_size)
    except KeyboardInterrupt:
        print(f"\nduoka: interrupted{f'; {_left(output)}' if output.done else ''}", file=sys.stderr)
        return 130
    except BatchFailed as error:
        print(tracebacks.shown(error.__cause__ or error), end="", file=sys.stderr)
        if output.done:
            say(_left(output))
        indices = range(begin + error.indices.start, begin + error.indices.stop)
        raise BatchFailed(indices, error.device, error.reason) from error
    output.finish()
    return 0


def _left(output: Writer) -> str:
    """Save the progress, and describe it."""
    output.keep()
    return f"{output.done:,} of {output.total:,} outputs are in {output.part}; --resume goes on"


def _write(predictions: Predictions, output: Writer, batch_size: int) -> None:
    with click.progressbar(length=output.total, file=sys.stderr, show_pos=True) as bar:
        bar.update(output.done)
        waiting: list[Any] = []
        for one in predictions:
            waiting.append(one)
            if len(waiting) == batch_size:
                output.write(waiting)
                bar.update(len(waiting))
                waiting = []
        output.write(waiting)
        bar.update(len(waiting))


def _stamp(path: Path | None) -> list[Any] | None:
    """Identify a file, or a folder's files, by names, sizes and times: hashing the contents would take long."""
    if path is None or not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [str(path.absolute()), hashlib.sha256(repr(told).encode()).hexdigest()]


class PredictCommand(click.Command):
    """Accepts --wait without a time."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default time."""
        return super().parse_args(ctx, [f"--wait={LONGEST_WAIT}" if word == "--wait" else word for word in args])


command = PredictCommand(
    "predict",
    callback=predict,
    help=HELP,
    epilog=EXAMPLE,
    params=[
        click.Argument(["model"]),
        click.Option(["--weights"], type=FILE, metavar="FILE", help="Of any format. [default: none]"),
        click.Option(["--data"], type=FILE, required=True, metavar="PATH", help="Each row or file is an item."),
        click.Option(["--out"], type=FILE, required=True, metavar="FILE", help="predictions.npy or .jsonl"),
        click.Option(["--devices"], default="auto", metavar="DEVICES", help="As for `duoka run`. [default: auto]"),
        click.Option(
            ["--wait"], metavar="[=TIME]", help="Queue until the devices are free, for at most TIME: --wait=30m."
        ),
        click.Option(["--batch-size"], type=int, default=32, metavar="N", help="[default: 32]"),
        click.Option(["--precision"], default="fp32", metavar="fp32|bf16|fp16", help="[default: fp32]"),
        click.Option(
            ["--read"], metavar="MODULE:NAME", help="A function that reads a file, given its path, as an item."
        ),
        click.Option(["--resume"], is_flag=True, help="Continue after the last batch that was written."),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
