"""Running a script that knows nothing of several devices: one interception per file, all of them listed here.

modules     module calls                                -> view/calls.py
norm        BatchNorm                                   -> view/norm.py
autograd    backward passes, torch.autograd.grad        -> strategies
loaders     DataLoader iterators                        -> data/shared.py
transforms  torch.compile, vmap, cond, torch.func        -> view/batch.py
optimizers  what optimizers update is kept in step      -> strategies
parallel    nn.DataParallel passes through
printing    tensors that are printed with their backward function
saving      torch.save: once
files       writing, making and looking for files: once
openings    files that are opened past `open`: once
databases   of sqlite: rank 0's, with replicas
commands    other programs: once
entropy     what is random, or a seed
clocks      time.time, datetime.now and their like
inference   duoka.predict: by every rank for itself
foreign     what is refused
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.errors import Refused
from duoka.network.keys import Key
from duoka.plain import (
    autograd,
    clocks,
    commands,
    constructors,
    databases,
    entropy,
    files,
    foreign,
    hooks,
    inference,
    loaders,
    modules,
    norm,
    openings,
    optimizers,
    parallel,
    printing,
    saving,
    transforms,
)
from duoka.plain.caller import Caller
from duoka.plain.chance import Chance
from duoka.plain.patching import Patches
from duoka.plain.session import Session
from duoka.plan import Plan
from duoka.private.lookup import untested
from duoka.strategies import create
from duoka.view.calls import ModuleCalls
from duoka.view.collectives import Collectives, CollectiveSlot, Exchange, ProcessCollectives
from duoka.view.determinism import be_deterministic
from duoka.view.direct import between
from duoka.view.draws import OwnStream
from duoka.view.far import FarCollectives
from duoka.view.nearby import Nearby
from duoka.view.view import View

INTERCEPTIONS = (
    modules,
    norm,
    autograd,
    hooks,
    constructors,
    transforms,
    loaders,
    optimizers,
    parallel,
    printing,
    saving,
    files,
    openings,
    databases,
    commands,
    entropy,
    clocks,
    inference,
    foreign,
)


SHOWN = 20  # lines of a kind in the report


def meet(
    plan: Plan, rank: int, store: Store, slot: CollectiveSlot, exchange: mmap.mmap | None, key: Key
) -> Collectives:
    """This rank among those of the plan. exchange: memory that the ranks share, or None. key: of the run."""
    size, seconds = plan.world_size, plan.timeout
    make: type[ProcessCollectives] = ProcessCollectives
    way: Exchange | None = None if exchange is None else Nearby(exchange, rank, size, seconds)
    if plan.machines.count > 1:
        make, way = FarCollectives, between(store, rank, size, seconds, key)
    ranks = make(store, rank, size, timedelta(seconds=seconds), slot, way)
    ranks.key = key
    return ranks


def run_plain(
    plan: Plan, ranks: Collectives, chance: Chance, say: Callable[[str], None], script: Callable[[], None]
) -> None:
    """Run `script`, the plan's, as one of its ranks; what it raises passes through.

    chance: the process's. say: shows a line of the header (heard from rank 0 only).
    """
    if plan.strategy == "exact":
        be_deterministic()
    strategy = create(plan.strategy, ranks, shares=plan.shares)
    view = strategy.view(ranks, say)
    view.vouch(plan.row_independent)
    if plan.randomness == "worker":
        view.own_stream = OwnStream(int.from_bytes(chance.shared(7), "little") + ranks.rank)
    for line in untested(torch.__version__):
        say(line)
    patches = Patches()
    caller = Caller(patches, ranks)
    chance.by_itself = caller.is_by_itself
    session = Session(plan, ranks, view, ModuleCalls(view), strategy, patches, caller, chance, say)
    for interception in INTERCEPTIONS:
        interception.install(session)
    try:
        script()
        if not patches.active:  # a process that the script forked has come to its end, which is not the run's
            return
        ranks.meet_at_end()
    except SystemExit as leaving:
        if leaving.code in (None, 0) and patches.active:
            _finish(view, plan.verbosity == "verbose")
        raise
    _finish(view, plan.verbosity == "verbose")


def _finish(view: View, verbose: bool) -> None:
    """The script has ended well: say what cost time, and do not let it pass that it caught a refusal."""
    if view.refusal is not None:
        raise Refused(f"the script caught this, and went on: {view.refusal}") from view.refusal
    for name in sorted(view.vouched.unused):
        view.say(f"--row-independent {name}: nothing of that name, and without a rule, was called with a batch")
    warning = view.gathered.warning()
    for line in view.gathered.lines()[:SHOWN] if verbose else filter(None, [warning]):
        view.say(line)
