"""Run a script written for one device on several: its interceptions are listed in INTERCEPTIONS."""

from __future__ import annotations

from collections.abc import Callable

import torch

from duoka.collectives.base import Collectives
from duoka.errors import Refused
from duoka.plain import (
    autograd,
    clocks,
    commands,
    constructors,
    databases,
    entropy,
    files,
    gpu_numbers,
    loaders,
    messages,
    modules,
    optimizers,
    refusals,
    saving,
    transforms,
)
from duoka.plain.session import open_session
from duoka.plain.shared_random import SharedRandom
from duoka.planning.plan import Plan
from duoka.view.view import View

INTERCEPTIONS = (
    modules.install,  # module calls: view/modules/calls.py
    autograd.install,  # backward passes, torch.autograd.grad: strategies
    autograd.install_hooks,  # hooks on leaves
    autograd.install_hooks_after_accumulation,
    constructors.install,  # tensors made of batches
    transforms.install,  # torch.compile, vmap, cond, torch.func: view/dispatch
    loaders.install_workers,  # processes that read a dataset
    loaders.install,  # DataLoader iterators: data/splitting.py
    optimizers.install,  # their parameters are kept in step: strategies
    modules.replace_data_parallel,  # nn.DataParallel calls its module
    messages.print_as_one_device,  # tensors that are printed with their backward function
    saving.install,  # torch.save: once
    transforms.install_scripting,  # TorchScript
    files.install,  # opening files for writing, changing and querying them: once
    files.install_descriptors,  # files opened by other functions than `open`: once
    files.install_locks,  # locks of files
    databases.install,  # sqlite: rank 0 has the file, the others replicas
    commands.install,  # other programs: once
    entropy.install,  # sources of random numbers, and seeds
    clocks.install,  # time.time, datetime.now and the like
    optimizers.number_tensors,  # the order of sets of tensors
    messages.attribute_warnings,  # the lines that warnings name
    modules.compute_predictions_whole,  # duoka.predict: on every rank by itself
    refusals.install,  # calls that a plain script cannot make
    gpu_numbers.install,  # numbers of GPUs: the rank's own GPU
)

SHOWN = 20  # lines of a kind in the report


def run_plain(
    plan: Plan,
    ranks: Collectives,
    shared_random: SharedRandom,
    say: Callable[[str], None],
    script: Callable[[], None],
) -> None:
    """Run the plan's `script` as one of its ranks; its exceptions pass through.

    shared_random: random numbers that all ranks share. say: prints a line of the header (on rank 0 only).
    """
    device = torch.device(plan.devices[0].type)
    session = open_session(plan.run_settings, ranks, shared_random, device, say, INTERCEPTIONS)
    view, patches = session.view, session.patches
    try:
        script()
        if not patches.active:  # a process that the script forked has ended, not the run
            return
        ranks.barrier_at_end()
    except SystemExit as leaving:
        if leaving.code in (None, 0) and patches.active:
            _finish(view, plan.verbosity == "verbose")
        raise
    finally:
        session.caller.at_end = True
        ranks.leave()
    _finish(view, plan.verbosity == "verbose")


def _finish(view: View, verbose: bool) -> None:
    """After a script that ended well: print what cost time, and raise a `Refused` that the script caught."""
    if view.refusal is not None:
        raise Refused(f"the script caught this, and went on: {view.refusal}") from view.refusal
    view.shares.each(lambda index: view.siblings[index].aliased.write_back())
    for name in sorted(view.row_independent.unused):
        why = "no function of this name was called with a batch, or it has a rule"
        view.say(f"--row-independent {name} had no effect: {why}")
    warning = view.whole_operations.warning()
    for line in view.whole_operations.lines()[:SHOWN] if verbose else filter(None, [warning]):
        view.say(line)
