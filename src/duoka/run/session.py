"""What a run has installed while it is open: the interceptions that make numbers right, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from duoka import environment
from duoka.errors import OptionError
from duoka.options import BatchNorm, Loading, Randomness, check_shares, shares_for
from duoka.plain import autograd, constructors, hooks, modules, norm, optimizers, transforms
from duoka.plain.caller import Caller
from duoka.plain.chance import Chance
from duoka.plain.patching import Patches
from duoka.plain.session import Session
from duoka.private.lookup import untested
from duoka.run import weights
from duoka.run.calls import ApiCalls
from duoka.run.reached import Passes
from duoka.strategies import create
from duoka.view.collectives import Collectives
from duoka.view.determinism import be_deterministic
from duoka.view.draws import OwnStream

INTERCEPTIONS = (modules, norm, autograd, hooks, constructors, transforms, optimizers)  # as in a plain script


@dataclass(frozen=True, slots=True)
class Settings:
    """What may give other numbers than one device: the options of `duoka run` of the same names.

    compress: what goes between ranks for gradients. strategy: "auto" or "exact". shares: of each batch, with exact.
    row_independent: functions without a rule that compute each row by itself.
    """

    batch_norm: BatchNorm = "whole"
    randomness: Randomness = "whole"
    loading: Loading = "auto"
    compress: str = "none"
    strategy: str = "auto"
    shares: int | None = None
    row_independent: tuple[str, ...] = ()


@dataclass(frozen=True)
class ApiSession(Session):
    """The session of a script that knows of ranks."""

    plan: Settings
    calls: ApiCalls
    passes: Passes


def settings_with(settings: Settings, strategy: str, shares: Any) -> Settings:
    """The settings with what `run.model` asks for; "auto" and None leave what there is.

    Raises:
        OptionError: shares that batches cannot be cut into, or without the strategy.
    """
    if strategy == "exact":
        settings = replace(settings, strategy=strategy)
    if shares is not None:
        check_shares(shares, "shares")
        if settings.strategy != "exact":
            raise OptionError("shares", shares, "given with strategy='exact'")
        settings = replace(settings, shares=shares)
    return settings


def set_exact_threads() -> None:
    """As many threads on any number of devices: sums within an operation depend on it."""
    threads = environment.threads() or ""
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)


def open_session(ranks: Collectives, settings: Settings, entropy: int, say: Callable[[str], None]) -> ApiSession:
    """Install the interceptions, which `session.patches.undo()` puts back. One device by itself needs none.

    Raises:
        OptionError: the strategy cannot be had with so many ranks, or with the other settings.
    """
    name, shares = "single" if ranks.world_size == 1 else "ddp", 0
    if settings.strategy == "exact":
        name, shares = "exact", shares_for(ranks.world_size, settings.shares, "shares")
        _check_exact(settings)
        be_deterministic()
    strategy = create(name, ranks, settings.compress, shares)
    view = strategy.view(ranks, say)
    view.vouch(settings.row_independent)
    for line in untested(torch.__version__):
        say(line)
    own_stream = OwnStream(entropy + ranks.rank)
    view.own_stream = own_stream if settings.randomness == "worker" else None
    calls = ApiCalls(view, own_stream)
    patches = Patches()
    passes = Passes(ranks, settings.batch_norm == "local", say)
    strategy.observe(passes)
    caller = Caller(patches, ranks)
    session = ApiSession(settings, ranks, view, calls, strategy, patches, caller, Chance(entropy), say, passes)
    if name != "single":
        for interception in INTERCEPTIONS:
            interception.install(session)
        weights.install(session.patches, calls)
        patches.reach()
    return session


def _check_exact(settings: Settings) -> None:
    for name, allowed in (("batch_norm", "whole"), ("randomness", "whole"), ("compress", "none")):
        given = getattr(settings, name)
        if given != allowed:
            raise OptionError(name, given, f"{allowed} with strategy='exact'", "its bits would depend on the devices")
