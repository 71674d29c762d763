"""The command line: a table of commands; each command's module is imported on use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import cast

import click

from duoka import __version__
from duoka.errors import AskedError, DuokaError
from duoka.system.messages import printable

# name -> (the module with its `command`, its line in `duoka --help`), so that the help imports none of them
COMMANDS = {
    "doctor": ("duoka.cli.doctor", "Check whether this machine will train well."),
    "forecast": ("duoka.cli.forecast", "Measure whether more devices make a script faster."),
    "gpus": ("duoka.cli.gpus", "Show the GPUs of this machine and who uses them."),
    "predict": ("duoka.cli.predict", "Compute a model's outputs for a data set, on all devices."),
    "prove": ("duoka.cli.prove", "Prove that a script computes the same on other devices."),
    "run": ("duoka.cli.run", "Run a training script on the devices you have."),
    "watch": ("duoka.cli.watch", "Show what the runs on this machine do."),
    "weights": ("duoka.cli.weights", "Show, convert and compare files of weights."),
}


class Table(click.Group):
    """A group of the commands in `COMMANDS`, each imported when it is requested."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command by name; None if it does not exist."""
        if name not in COMMANDS:
            return None
        return cast(click.Command, import_module(COMMANDS[name][0]).command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, but suggest the closest name in the error."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            # `duoka train.py` is a likely slip; a command of that name can never be meant.
            close = get_close_matches(name, COMMANDS, n=1) or (["run " + name] if name.endswith(".py") else [])
            hint = f"; did you mean `duoka {close[0]}`?" if close else ""
            ctx.fail(f"there is no command {name!r}; there is: {', '.join(sorted(COMMANDS))}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(COMMANDS.items())])


@click.group(
    cls=Table,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`duoka COMMAND --help` says more about one command.",
)
@click.version_option(__version__, message="duoka %(version)s")
def cli() -> None:
    """Same script, same result, same checkpoint: PyTorch training on one device or many."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; 2 for an invalid request, 1 for other errors.

    A command returns a function, which is called here, outside of click: click must not handle exceptions and signals
    of the user's script.
    """
    _open_standard_files()
    try:
        todo = _parse(args)
        return todo() if callable(todo) else todo
    except AskedError as error:
        return _fail(str(error), 2)
    except DuokaError as error:
        return _fail(str(error), 1)


def _open_standard_files() -> None:
    """Open /dev/null for standard streams that were closed (`<&-`).

    Otherwise a socket or a log would get the number of a standard stream, and be read and written as one.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens as the lowest free descriptor


def _parse(args: Sequence[str] | None) -> Callable[[], int] | int:
    """Parse the command line: returns the function to run, or an exit code."""
    try:  # in standalone mode click would print errors in its own words, and exit
        return cast("Callable[[], int] | int", cli.main(args, prog_name="duoka", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message(), err=True)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        more = f"\nduoka: see `{context.command_path} --help`" if context else ""
        return _fail(_plainly(error) + more, 2)
    except click.Abort:  # Ctrl-C, as click says it
        return 130


def _plainly(error: click.ClickException) -> str:
    """Format a click error like duoka's own: no capital, no full stop."""
    if isinstance(error, click.NoSuchOption):  # click's words change with its version
        close = get_close_matches(error.option_name, error.possibilities or (), n=1)
        text = f"no such option {error.option_name!r}" + "".join(f". Did you mean {name!r}?" for name in close)
        if error.ctx is not None and any(parameter.name == "words" for parameter in error.ctx.command.params):
            text += f"\nduoka: options of the script follow it: {error.ctx.command_path} train.py --epochs 5"
        return text
    message = error.format_message()
    return message[:1].lower() + message[1:].rstrip(".")


def _fail(message: str, code: int) -> int:
    # Names of files and tensors may contain control characters.
    lines = "\n".join(map(printable, message.split("\n")))
    print(f"duoka: error: {lines}", file=sys.stderr)
    return code
