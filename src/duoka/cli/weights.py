"""`duoka weights`: show, convert and compare files of weights."""

from __future__ import annotations

import click

from duoka.checkpoint import comparing  # imports no torch before it must
from duoka.errors import OptionError

KEY = click.Option(["--key"], metavar="KEY", help="Key of the weights inside the file, such as ema or model.encoder.")
OBJECTS = click.Option(
    ["--objects"],
    default="refuse",
    metavar="refuse|inert",
    help="Pickles with objects of unknown classes: refuse them, or read them with stand-ins that run no code.",
)
RENAME = click.Option(
    ["--rename"],
    multiple=True,
    metavar="OLD=NEW",
    help="A regular expression and its replacement, for names. May be given more than once.",
)
SHARDS = click.Option(
    ["--max-shard-size"],
    metavar="SIZE",
    help="Write several files and an index, if it is more than this, such as 5GB.",
)
KNOWN = "FILE: safetensors, .pth .pt .bin .ckpt, sharded files with an index, a DCP directory, a duoka checkpoint."


def show(files: tuple[str, ...], **how: str) -> int:
    """Print the contents of files."""
    click.echo("\n\n".join(comparing.show(file, **how) for file in files))  # type: ignore[arg-type]
    return 0


def convert(source: str, target: str, rename: tuple[str, ...], **how: str | None) -> int:
    """Convert a file of weights to another format."""
    wrong = [pair for pair in rename if "=" not in pair]
    if wrong:
        raise OptionError("--rename", wrong[0], "OLD=NEW")
    pairs = dict(pair.split("=", 1) for pair in rename)
    click.echo(comparing.convert(source, target, rename=pairs, **how))  # type: ignore[arg-type]
    return 0


def diff(first: str, second: str, **how: str) -> int:
    """Print the differences of two files; returns 1 if they differ."""
    comparison = comparing.compare(first, second, **how)  # type: ignore[arg-type]
    click.echo(comparison)
    return 0 if comparison.equal else 1


command = click.Group(
    "weights",
    help=f"Show, convert and compare files of weights. No code in a file is run.\n\n{KNOWN}",
    commands=[
        click.Command(
            "show",
            callback=show,
            help="Print names, shapes, types and sizes. The tensors' data are not read.",
            params=[click.Argument(["files"], nargs=-1, required=True, metavar="FILE..."), KEY, OBJECTS],
        ),
        click.Command(
            "convert",
            callback=convert,
            help="Write the weights in SOURCE to TARGET: .safetensors, .pth .pt .bin .ckpt, or a DCP directory (x/).",
            params=[click.Argument(["source"]), click.Argument(["target"]), KEY, RENAME, OBJECTS, SHARDS],
        ),
        click.Command(
            "diff",
            callback=diff,
            help="Print which tensors differ and by how much. The exit code is 1 if any does.",
            params=[click.Argument(["first"]), click.Argument(["second"]), KEY, OBJECTS],
        ),
    ],
)
