"""The interceptions that are installed while a run of the API is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from duoka.collectives.base import Collectives
from duoka.errors import OptionError
from duoka.plain import autograd, constructors, loaders, modules, optimizers, transforms
from duoka.plain.saving import install_safetensors
from duoka.plain.session import Session, open_session
from duoka.plain.shared_random import SharedRandom
from duoka.planning.options import RunSettings, check_shares, shares_for
from duoka.system import environment

INTERCEPTIONS = (  # as in a plain script
    modules.install,
    autograd.install,
    autograd.install_hooks,
    autograd.install_hooks_after_accumulation,
    constructors.install,
    transforms.install_scripting,
    transforms.install,
    optimizers.install,
    loaders.install_workers,
)


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
) -> Session:
    """Open the session of the API, with interceptions if more than one rank or "exact" needs them.

    device: of this rank. Raises OptionError if the strategy does not allow so many ranks, or the other settings.
    """
    if settings.strategy == "exact":
        settings = replace(settings, shares=shares_for(ranks.world_size, settings.shares or None, "shares"))
        for option, allowed in (("batch_norm", "whole"), ("randomness", "whole"), ("compress", "none")):
            if (value := getattr(settings, option)) != allowed:
                hint = "its bits would depend on the devices"
                raise OptionError(option, value, f"{allowed} with strategy='exact'", hint)
    else:  # for the models that request it
        settings = replace(settings, strategy="single" if ranks.world_size == 1 else "fsdp")
    installed = INTERCEPTIONS if settings.strategy != "single" else ()
    session = open_session(settings, ranks, SharedRandom(entropy), device, say, installed, is_plain=False)
    if installed:
        install_safetensors(session)
        session.patches.reach()
    return session
