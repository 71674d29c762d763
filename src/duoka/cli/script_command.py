"""Commands that end with a script: their options, and what on the line is duoka's and what the script's.

    duoka run [options] SCRIPT [words of the script]
    duoka run SCRIPT [options] -- [words of the script]
    duoka run SCRIPT [options] [words of the script]

Words after the script are the script's. But a `--` there ends duoka's options, and only these may stand between the
script and it. Without a `--` and without options before the script, options directly after it are duoka's if duoka
has them and the script does not define them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from duoka import script
from duoka.planning.options import ONE_MACHINE, Machines, Options, seconds, whole_number
from duoka.script import Target
from duoka.script.target import STANDARD_INPUT

ORDER = """\
All that follows the script is the script's. Options may also stand after the script, if a `--` follows them;
without one, those directly after it are duoka's if none stands before it and the script does not take
them. A `--` for the script itself is written twice.
"""

STRATEGY = (
    "How parameters are synchronized. fsdp: each device holds a part of the model. hsdp: the same on each of several "
    "machines, each of which holds the whole model. exact: the same bits on any number of devices. auto: ddp if it "
    "fits on each device, else fsdp, as the first steps on one CPU worker tell before the run. [default: single for "
    "one device, ddp for several]"
)

BLOCKS = (
    "With fsdp: classes of modules whose parameters are gathered together. [default: entries of the model's lists]"
)

ROWS = (
    "How the devices share the rows of a batch. auto: by speed, measured in the first steps. [default: auto for GPUs "
    "that differ, else even]"
)

ROW_INDEPENDENT = (
    "Autograd Functions, scripted functions and operators of extensions that compute each row by itself, which duoka "
    "cannot know: they get each rank's rows. `duoka prove` compares."
)

_TOGETHER = "--machines 2 --machine 0 --rendezvous node1:29500"
ELSEWHERE = (  # an option, its names in other launchers, and an example
    ("--devices", "n np nproc nproc_per_node num_processes gpu gpus num_gpus", "--devices 2"),
    ("--machines", "nnodes num_machines", _TOGETHER),
    ("--machine", "node_rank machine_rank", _TOGETHER),
    (
        "--rendezvous",
        "master_addr master_port rdzv_endpoint rdzv_backend rdzv_id main_process_ip main_process_port",
        _TOGETHER,
    ),
    ("--restarts", "max_restarts", "--restarts 3"),
)

DEFAULTS = {"--wait": "720h"}  # the value of an option that is given without `=value`


def option(names: str, metavar: str = "", text: str = "", default: Any = None, kind: Any = None) -> click.Option:
    """Return an option. names: as click takes them, separated by spaces. metavar: its value; empty for a flag."""
    if not metavar:
        return click.Option(names.split(), is_flag=True, help=text)
    return click.Option(names.split(), metavar=metavar, help=text, default=default, type=kind)


PATH = click.Path(path_type=Path)
# Options of all these commands.
IS_MODULE = option("-m is_module", text="SCRIPT is a module's name, as for `python -m`.")
RUNNING = (
    option(
        "--kind", "auto|plain|distributed|api", "Override the detected kind of script, if it can be several.", "auto"
    ),
    option("--threads", "N", "Processor threads for each worker. [default: cores / workers]"),
    option(
        "--timeout", "TIME", "Longest time that a rank waits for the others: 90, 90s, 10m, 1h. [default: 10m]", "10m"
    ),
)
COMPUTING = (
    option("--strategy", "single|ddp|fsdp|hsdp|exact|auto", STRATEGY, ""),
    option("--blocks", "NAME,...", BLOCKS),
    option(
        "--checkpoint-activations",
        text="With fsdp: blocks compute activations again in the backward pass, which takes less memory.",
    ),
    option("--cpu-offload", text="With fsdp: keep parameters, gradients and optimizer states in the host's memory."),
    option("--shares", "N", "With exact: shares of each batch, a power of two. [default: 8, or as many as devices]"),
    option("--rows", "auto|even|3:1", ROWS, ""),
    option(
        "--batch-norm",
        "whole|local",
        "Statistics of the whole batch, or of each share (faster, but other numbers).",
        "whole",
    ),
    option(
        "--randomness",
        "whole|worker",
        "Draws for the whole batch, or each rank's own (faster, but other numbers).",
        "whole",
    ),
    option(
        "--loading",
        "auto|whole|shared",
        "Each rank loads the whole batch, or its share. auto: its share where that is safe.",
        "auto",
    ),
    option("--row-independent", "NAME,...", ROW_INDEPENDENT),
)


class ScriptCommand(click.Command):
    """A command whose arguments end with a script and its own arguments; shows options in groups.

    title: of the first group. options, shown: those of the first and the last group that are this command's own.
    """

    def __init__(
        self,
        name: str,
        *,
        title: str,
        options: tuple[click.Option, ...],
        shown: tuple[click.Option, ...],
        examples: str,
        **how: Any,
    ) -> None:
        self._groups = (
            (title, (IS_MODULE, *options, *RUNNING)),
            ("How plain scripts are computed", COMPUTING),
            ("What is shown", shown),
        )
        self._examples = examples
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        params = [*(option for _, group in self._groups for option in group), words]
        # click stops at the first argument, the script: options of the same name after it are not duoka's.
        settings = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
        super().__init__(name, params=params, context_settings=settings, **how)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Separate duoka's options from the script's arguments before click parses them."""
        takes_value = {  # of all options, also of --help
            name: not (isinstance(param, click.Option) and (param.is_flag or name in DEFAULTS))
            for param in self.get_params(ctx)
            for name in param.opts
            if name.startswith("-")
        }
        check_habits(args, takes_value)
        words = arrange(args, takes_value)
        before = _leading(words, takes_value)
        with_values = [f"{word}={DEFAULTS[word]}" if word in DEFAULTS else word for word in words[:before]]
        return super().parse_args(ctx, with_values + words[before:])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the three forms."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] SCRIPT [ARGS]...")
        for form in ("[OPTIONS] -m MODULE [ARGS]...", "SCRIPT [OPTIONS] -- [ARGS]..."):
            formatter.write_usage(ctx.command_path, form, prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups, then examples."""
        for title, group in (*self._groups, ("About this", (self.get_help_option(ctx),))):
            with formatter.section(title):
                formatter.write_dl([record for option in group if option and (record := option.get_help_record(ctx))])
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self._examples.splitlines()))
        formatter.write_paragraph()
        formatter.write_text(ORDER)


def options_of(
    words: tuple[str, ...],
    is_module: bool,
    threads: str | None,
    timeout: str,
    shares: str | None,
    row_independent: str | None,
    blocks: str | None,
    quiet: bool,
    verbose: bool,
    step_timeout: str = "auto",
    restarts: str = "0",
    machines: Machines = ONE_MACHINE,
    **others: Any,
) -> Options:
    """Convert a command line to `Options`. words: of the script. others: those that `Options` takes unchanged."""
    context = click.get_current_context()
    if not words:
        raise click.UsageError(f"a script is missing; for example: {context.command_path} train.py", context)
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose exclude each other", context)
    return Options(
        Target(words[0], words[1:], is_module),
        threads=None if threads is None else whole_number(threads, "--threads"),
        timeout=seconds(timeout),
        step_timeout=None if step_timeout == "auto" else seconds(step_timeout, "--step-timeout"),
        restarts=whole_number(restarts, "--restarts"),
        shares=None if shares is None else whole_number(shares, "--shares"),
        row_independent=() if row_independent is None else tuple(map(str.strip, row_independent.split(","))),
        blocks=() if blocks is None else tuple(map(str.strip, blocks.split(","))),
        verbosity="quiet" if quiet else "verbose" if verbose else "normal",
        machines=machines,
        **others,
    )


# What is duoka's, and what the script's.


def arrange(words: list[str], options: Mapping[str, bool]) -> list[str]:
    """Move duoka's options to the front, then the script, then the script's words.

    words: the command line after `duoka run`. options: duoka's options by name, and True for those that take a value.
    Raises ScriptError if the script does not exist, UsageError if a word between it and `--` is not an option, or
    lacks its value.
    """
    before = _leading(words, options)
    if before >= len(words) or (words[before].startswith("-") and words[before] != STANDARD_INPUT):
        return words  # no script, or an unknown option: click reports it
    target, rest = words[before], words[before + 1 :]
    # Short options and --help after the script are always its own.
    may_follow = {name: value for name, value in options.items() if name.startswith("--") and name != "--help"}
    ours: list[str] = []
    taken = 0  # of the words after the script, those that are options and their values
    if "--" in rest:
        end = rest.index("--")
        ours, rest = rest[:end], rest[end + 1 :]
        taken = _leading(ours, may_follow)
        if taken < len(ours) and not ours[taken].startswith("--"):  # click reports a misspelt option
            raise click.UsageError(
                f"{ours[taken]!r} stands between {target} and --, where only duoka's options may; "
                f"to give {target} all that follows it, write: {target} -- {ours[0]} ..."
            )
    elif words[:before] in ([], ["-m"]) and _leading(rest, may_follow):
        source = script.read(Target(target, is_module=before > 0))  # parsed, not run
        taken = _leading(rest, {name: value for name, value in may_follow.items() if not source.takes(name)})
        ours, rest = rest[:taken], rest[taken:]
    if taken > len(ours):
        raise click.UsageError(f"option {ours[-1]!r} requires a value")
    return [*words[:before], *ours, target, *rest]


def check_habits(words: Sequence[str], options: Mapping[str, bool]) -> None:
    """Reject options of other launchers, a leading `python` and a value without `=`, and suggest duoka's form."""
    before = _leading(words, options)
    first, second = [*words[before : before + 2], "", ""][:2]
    theirs = first.partition("=")[0]
    asked = theirs.lstrip("-").replace("-", "_") if theirs.startswith("-") else ""
    for name, names, example in ELSEWHERE:
        if name in options and asked in names.split():
            raise click.UsageError(
                f"no such option {theirs!r}: here it is {name}, as in `duoka run {example} train.py`"
            )
    # People put the launcher before a command line that they have: `duoka run python train.py`.
    if re.fullmatch(r"python[0-9.]*", first) and second.endswith(".py"):
        raise click.UsageError(f"{first} is not needed: duoka run {second}")
    # `--wait 30m train.py`: 30m would be the script.
    last = words[before - 1] if 0 < before < len(words) else ""
    if last in DEFAULTS and re.fullmatch(r"[0-9.]+[smh]?", first):
        raise click.UsageError(f"{last} takes a time after an =: {last}={first}")


def _leading(words: Sequence[str], options: Mapping[str, bool]) -> int:
    """Count the leading words that are options and their values; one more if the last value is missing."""
    count = 0
    while count < len(words):
        name, equals, _ = words[count].partition("=")
        if name not in options:
            break
        count += 2 if options[name] and not equals else 1
    return count
