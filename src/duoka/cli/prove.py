"""`duoka prove`: whether a script computes on some devices what it computes on another."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duoka import environment
from duoka.cli.run import GROUPS, Groups, ScriptCommand, asked_for
from duoka.devices import inventory
from duoka.devices.locks import Held, Locks
from duoka.devices.taking import marked
from duoka.errors import OptionError
from duoka.options import Options, Target, one_of
from duoka.plan import Plan, decide, header

if TYPE_CHECKING:
    from duoka.proving.proof import Asked

INTRODUCTION = """\
Show whether a script computes on some devices what it computes on another.

Runs the script for its first steps on each of the devices, compares all parameters, buffers and batches after
every optimizer step, and says: identical bits, equal to rounding, or different, and where first. What the script
writes meanwhile goes to a scratch folder and is removed.
"""

EXAMPLES = """\
duoka prove --devices cpu:2 train.py                    plain python against two CPU workers
duoka prove --devices 0,1 train.py --epochs 5           GPU 0 against GPUs 0 and 1; --epochs 5 is for train.py
duoka prove --devices cpu:1 --devices cpu:2 --devices cpu:4 train.py    the first against each of the others
duoka prove --want bits --devices cpu:2 train.py        exit code 0 only for identical bits
"""

DEVICES = (
    "As for `duoka run`, and may be given several times: the first is what the others are compared with. "
    "Given once, or not at all, it is compared with plain python on the first of these devices. [default: auto]"
)

LONGEST = 100_000

_OF_RUN = {str(option.name): option for _, group in GROUPS for option in group}

PROVE_GROUPS: Groups = (
    (
        "What to compare",
        (
            _OF_RUN["is_module"],
            click.Option(["--devices"], multiple=True, metavar="DEVICES", help=DEVICES),
            click.Option(
                ["--steps"],
                type=int,
                default=10,
                metavar="K",
                help="How many steps of optimizers, of all together. [default: 10]",
            ),
            click.Option(
                ["--want"],
                default="rounding",
                metavar="bits|rounding",
                help="What has to be shown for the exit code 0. [default: rounding]",
            ),
            click.Option(
                ["--seed"],
                type=int,
                default=0,
                metavar="N",
                help="Every run begins with it, in torch, random and numpy; the script may seed again. [default: 0]",
            ),
            _OF_RUN["kind"],
            _OF_RUN["threads"],
            _OF_RUN["timeout"],
        ),
    ),
    GROUPS[1],
    (
        "What is shown",
        (
            click.Option(["--json", "as_json"], is_flag=True, help="As data."),
            click.Option(["-v", "--verbose"], is_flag=True, help="A table of all steps, too."),
            click.Option(["-q", "--quiet"], is_flag=True, help="The verdict alone."),
            click.Option(
                ["--log-dir"],
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Keep what the script printed in each run here. [default: not kept]",
            ),
        ),
    ),
)


def prove(
    words: tuple[str, ...],
    is_module: bool,
    devices: tuple[str, ...],
    steps: int,
    want: str,
    seed: int,
    as_json: bool,
    **asked: Any,
) -> Callable[[], int]:
    """Check what was asked for, and return what proves it."""
    if not words:
        raise click.UsageError("a script is missing; for example: duoka prove train.py", click.get_current_context())
    one_of("--want", want, ("bits", "rounding"))
    if not 1 <= steps <= LONGEST:
        raise OptionError("--steps", steps, f"a whole number from 1 to {LONGEST:,}")
    if not 0 <= seed < 2**63:
        raise OptionError("--seed", seed, "a whole number from 0 to 2**63 - 1")
    target = Target(words[0], words[1:], is_module)
    opts = asked_for(target, step_timeout="auto", restarts="0", **asked)
    shown = "json" if as_json else opts.verbosity
    return partial(_prove, opts, devices or ("auto",), steps, seed, want, shown)


def _prove(opts: Options, devices: Sequence[str], steps: int, seed: int, want: str, shown: str) -> int:
    plans, held = _decide_and_take([replace(opts, devices=words) for words in devices])
    with held:
        code = _run(_asked(opts, devices, plans, steps, seed, want), shown)
    with suppress(OSError):  # the script ran in workers; taking torch down here only takes time
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _decide_and_take(asked: Sequence[Options]) -> tuple[list[Plan], Held]:
    """Decide all plans, and take the cards of all of them for as long as the proof takes."""
    visible, threads = environment.visible_cards(), environment.threads()
    seen = inventory.read()  # a driver that is slow keeps nobody else waiting
    with Locks() as locks:
        known = marked(seen, locks)
        plans = [decide(opts, known, visible, threads) for opts in asked]
        uuids = sorted({device.uuid for plan in plans for device in plan.devices if device.uuid})
        held = locks.hold(uuids, f"duoka prove {asked[0].target.name}")[0] if uuids else Held()
    return plans, held


def _asked(opts: Options, devices: Sequence[str], plans: Sequence[Plan], steps: int, seed: int, want: Any) -> Asked:
    """The sides: the first is what all others are compared with."""
    from duoka.proving.proof import Asked  # only now: a plan is made without torch
    from duoka.proving.sides import Side, as_python

    names = [words if words != "auto" else _named(plan) for words, plan in zip(devices, plans, strict=True)]
    sides = [Side(name, plan) for name, plan in zip(names, plans, strict=True)]
    if len(sides) == 1:
        sides = [as_python(plans[0], opts.threads), *sides]
    return Asked(sides[0], tuple(sides[1:]), steps, seed, want, opts.log_dir)


def _named(plan: Plan) -> str:
    """`auto` by what it was found to be."""
    first = plan.devices[0]
    if first.type == "cpu":
        return f"cpu:{len(plan.devices)}"
    return ",".join(str(device.index) for device in plan.devices) if first.type == "cuda" else str(first)


def _run(asked: Asked, shown: str) -> int:
    from duoka.proving.proof import prove as start
    from duoka.proving.showing import as_data, as_text
    from duoka.proving.sides import SideFailed, Stopped

    def say(text: str) -> None:
        if shown in ("normal", "verbose"):
            print(f"duoka: {text}", file=sys.stderr, flush=True)

    for side in asked.others:
        for line in header(side.plan).removeprefix("duoka: ").split("\nduoka: "):
            say(f"{side.name}: {line}")
    try:
        proof = start(asked, say)
    except Stopped as stopped:
        print("duoka: interrupted" if stopped.code == 130 else "duoka: stopped", file=sys.stderr, flush=True)
        return stopped.code
    except SideFailed as failed:
        print(failed.report, end="", file=sys.stderr, flush=True)
        raise
    click.echo(as_data(proof) if shown == "json" else as_text(proof, shown))
    return 0 if proof.holds else 1


command = ScriptCommand("prove", callback=prove, help=INTRODUCTION, groups=PROVE_GROUPS, examples=EXAMPLES)
