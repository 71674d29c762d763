"""The interceptions that are installed while a run of the API is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from duoka.collectives.base import Collectives
from duoka.errors import OptionError
from duoka.plain import autograd, constructors, modules, optimizers, scripting, transforms
from duoka.plain.saving import install_safetensors
from duoka.plain.session import Session, open_session
from duoka.plain.shared_random import SharedRandom
from duoka.planning.options import BatchNorm, Loading, Randomness, check_shares, shares_for
from duoka.run.backward import BackwardObserver
from duoka.strategies import create
from duoka.strategies.exact import be_deterministic
from duoka.system import environment

INTERCEPTIONS = (  # as in a plain script
    modules.install,
    autograd.install,
    autograd.install_hooks,
    constructors.install,
    scripting.install,
    transforms.install,
    optimizers.install,
)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that change numbers: the options of `duoka run` of the same names.

    compress: of gradients between ranks. strategy: "auto" or "exact". shares: of each batch, for exact.
    row_independent: functions without a rule that compute each row by itself. cpu_offload: of parts of parameters.
    weights: of the ranks' shares of a batch; empty: even. measures_rows: whether these follow from each rank's time.
    """

    batch_norm: BatchNorm = "whole"
    randomness: Randomness = "whole"
    loading: Loading = "auto"
    compress: str = "none"
    strategy: str = "auto"
    shares: int | None = None
    row_independent: tuple[str, ...] = ()
    cpu_offload: bool = False
    weights: tuple[float, ...] = ()
    measures_rows: bool = False


@dataclass(frozen=True)
class ApiSession(Session):
    """The session of a script that uses the API. backward: checks after each backward pass."""

    plan: RunSettings
    backward: BackwardObserver


def settings_with(settings: RunSettings, strategy: str, shares: Any) -> RunSettings:
    """Return the settings changed by options of `run.model`; "auto" and None change nothing.

    Raises OptionError if the number of shares is not allowed, or given without strategy "exact".
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
    """Set the same number of threads for any number of devices, as sums within operations depend on it."""
    threads = environment.threads() or ""
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)


def open_api_session(
    ranks: Collectives, settings: RunSettings, device: torch.device, entropy: int, say: Callable[[str], None]
) -> ApiSession:
    """Open the session of the API, with interceptions if more than one rank or "exact" needs them.

    device: of this rank. Raises OptionError if the strategy does not allow so many ranks, or the other settings.
    """
    name, shares = "single" if ranks.world_size == 1 else "fsdp", 0  # for the models that request it
    if settings.strategy == "exact":
        name, shares = "exact", shares_for(ranks.world_size, settings.shares, "shares")
        for option, allowed in (("batch_norm", "whole"), ("randomness", "whole"), ("compress", "none")):
            if (value := getattr(settings, option)) != allowed:
                hint = "its bits would depend on the devices"
                raise OptionError(option, value, f"{allowed} with strategy='exact'", hint)
        be_deterministic(device)
    strategy = create(
        name, ranks, settings.compress, shares, settings.weights, cpu_offload=settings.cpu_offload, every=False
    )
    backward = BackwardObserver(ranks, settings.batch_norm == "local", say)
    strategy.observe(backward)
    installed = INTERCEPTIONS if name != "single" else ()
    session = open_session(settings, strategy, ranks, SharedRandom(entropy), device, say, installed, converts=False)
    if installed:
        install_safetensors(session)
        session.patches.reach()
    return ApiSession(**vars(session), backward=backward)
