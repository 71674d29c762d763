"""Separate duoka's options from the script's arguments on the command line of `duoka run`.

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

from click import UsageError

from duoka import script
from duoka.script import Target
from duoka.script.files import STANDARD_INPUT

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


def arrange(words: list[str], options: Mapping[str, bool]) -> list[str]:
    """Move duoka's options to the front, then the script, then the script's words.

    Args:
        words: the command line after `duoka run`.
        options: duoka's options by name, and True for those that take a value.

    Raises:
        ScriptError: the script does not exist.
        click.UsageError: a word between the script and `--` is not an option, or lacks its value.
    """
    before = _leading(words, options)
    if before >= len(words) or (words[before].startswith("-") and words[before] != STANDARD_INPUT):
        return words  # no script, or an unknown option: click reports it
    target, rest = words[before], words[before + 1 :]
    may_follow = {name: value for name, value in options.items() if name.startswith("--") and name != "--help"}
    ours: list[str] = []
    if "--" in rest:
        end = rest.index("--")
        ours, rest = rest[:end], rest[end + 1 :]
        _check_options_only(target, ours, may_follow)
    elif words[:before] in ([], ["-m"]) and _leading(rest, may_follow):
        found = script.read(Target(target, is_module=before > 0))
        end = _leading(rest, {name: value for name, value in may_follow.items() if not found.takes(name)})
        ours, rest = rest[:end], rest[end:]
        _check_value(ours, end)
    return [*words[:before], *ours, target, *rest]


def check_habits(words: Sequence[str], options: Mapping[str, bool]) -> None:
    """Reject options of other launchers and a leading `python`, and suggest duoka's form.

    Raises:
        click.UsageError: such a word was given.
    """
    before = _leading(words, options)
    first, second = [*words[before : before + 2], "", ""][:2]
    theirs = first.partition("=")[0]
    asked = theirs.lstrip("-").replace("-", "_") if theirs.startswith("-") else ""
    for name, names, example in ELSEWHERE:
        if name in options and asked in names.split():
            raise UsageError(f"no such option {theirs!r}: here it is {name}, as in `duoka run {example} train.py`")
    if re.fullmatch(r"python[0-9.]*", first) and second.endswith(".py"):
        raise UsageError(f"{first} is not needed: duoka run {second}")


def check_times(words: list[str], options: Mapping[str, bool], defaults: Mapping[str, str]) -> None:
    """Reject a time after an option that takes it only with `=`.

    Raises:
        click.UsageError: it was given.
    """
    before = _leading(words, options)
    if 0 < before < len(words) and words[before - 1] in defaults and re.fullmatch(r"[0-9.]+[smh]?", words[before]):
        raise UsageError(f"{words[before - 1]} takes a time after an =: {words[before - 1]}={words[before]}")


def with_values(words: list[str], options: Mapping[str, bool], defaults: Mapping[str, str]) -> list[str]:
    """Insert the default values of options before the script that were given without one."""
    before = _leading(words, options)
    return [f"{word}={defaults[word]}" if word in defaults else word for word in words[:before]] + words[before:]


def _leading(words: Sequence[str], options: Mapping[str, bool]) -> int:
    """Count the leading words that are options and their values; one more if the last value is missing."""
    count = 0
    while count < len(words):
        name, equals, _ = words[count].partition("=")
        if name not in options:
            break
        count += 2 if options[name] and not equals else 1
    return count


def _check_value(words: Sequence[str], end: int) -> None:
    if end > len(words):
        raise UsageError(f"option {words[-1]!r} requires a value")


def _check_options_only(target: str, words: Sequence[str], options: Mapping[str, bool]) -> None:
    end = _leading(words, options)
    _check_value(words, end)
    if end < len(words) and not words[end].startswith("--"):  # click reports a misspelt option
        raise UsageError(
            f"{words[end]!r} stands between {target} and --, where only duoka's options may; "
            f"to give {target} all that follows it, write: {target} -- {words[0]} ..."
        )
