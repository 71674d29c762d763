"""`duoka prove`: compare the computations of a script on several devices, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from duoka.cli.script_command import ScriptCommand, option, options_of
from duoka.cli.trial import decide_and_take, say_plan, sayer, shown_options, to_the_end, write_report
from duoka.errors import OptionError
from duoka.planning.options import Options, one_of

if TYPE_CHECKING:
    from duoka.proving.proof import ProofRequest

INTRODUCTION = """\
Prove that a script computes the same on other devices.

Runs the first steps of the script on each of the devices, compares all parameters, buffers and batches after every
optimizer step, and prints: identical bits, equal to rounding, or different, and the first difference. Files that the
script writes go to a scratch folder, which is removed.
"""

EXAMPLES = """\
duoka prove --devices cpu:2 train.py                    plain python against two CPU workers
duoka prove --devices 0,1 train.py --epochs 5           GPU 0 against GPUs 0 and 1; --epochs 5 is for train.py
duoka prove --devices cpu:1 --devices cpu:2 --devices cpu:4 train.py    the first against each of the others
duoka prove --want bits --devices cpu:2 train.py        exit code 0 only for identical bits
"""

DEVICES = (
    "As for `duoka run`; may be given several times, and the first is the reference for the others. "
    "Given once, or not at all, the reference is plain python on the first of these devices. [default: auto]"
)

SEED = "Seed of torch, random and numpy in every run; the script may seed again. [default: 0]"
MOST_STEPS = 100_000

OPTIONS = (
    click.Option(["--devices"], multiple=True, metavar="DEVICES", help=DEVICES),
    option("--steps", "K", "Steps of all optimizers together. [default: 10]", 10, int),
    option("--want", "bits|rounding", "The verdict needed for exit code 0. [default: rounding]", "rounding"),
    option("--seed", "N", SEED, 0, int),
)


def prove(
    devices: tuple[str, ...], steps: int, want: Any, seed: int, as_json: bool, **others: Any
) -> Callable[[], int]:
    """Check the options, and return the function that runs the comparison."""
    opts = options_of(**others)
    one_of("--want", want, ("bits", "rounding"))
    if not 1 <= steps <= MOST_STEPS:
        raise OptionError("--steps", steps, f"a whole number from 1 to {MOST_STEPS:,}")
    if not 0 <= seed < 2**63:
        raise OptionError("--seed", seed, "a whole number from 0 to 2**63 - 1")
    devices = devices or ("auto",)

    def run() -> int:
        plans, held = decide_and_take("prove", opts, lambda decided: [decided(words) for words in devices])
        with held:
            from duoka.proving.proof import ProofRequest, ScriptRun, as_python  # imports torch; a plan does not

            names = [name if name != "auto" else plan.device_words for name, plan in zip(devices, plans, strict=True)]
            runs = list(map(ScriptRun, names, plans))
            reference, *others = runs if len(runs) > 1 else [as_python(plans[0], opts.threads), *runs]
            request = ProofRequest(reference, tuple(others), steps, seed, want, opts.log_dir)
            return to_the_end(lambda: _run(opts, request, "json" if as_json else opts.verbosity))

    return run


def _run(opts: Options, request: ProofRequest, shown: str) -> int:
    from duoka.proving.proof import prove as start
    from duoka.proving.showing import as_data, as_text, page

    say = sayer(shown)
    for run in request.others:
        say_plan(run.name, run.plan, say)
    proof = start(request, say)
    write_report(opts.report, lambda: page(proof, opts.target.name))
    click.echo(as_data(proof) if shown == "json" else as_text(proof, shown))
    return 0 if proof.holds else 1


command = ScriptCommand(
    "prove",
    callback=prove,
    help=INTRODUCTION,
    title="What to compare",
    options=OPTIONS,
    shown=shown_options("Also a table of all steps.", "Only the verdict."),
    examples=EXAMPLES,
)
