"""What a run has installed while it is open: the interceptions that make numbers right, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from duoka.options import BatchNorm, Loading, Randomness
from duoka.plain import autograd, constructors, hooks, modules, norm, optimizers, transforms
from duoka.plain.caller import Caller
from duoka.plain.patching import Patches
from duoka.plain.session import Session
from duoka.run import weights
from duoka.run.boundary import ApiBoundary
from duoka.run.reached import Passes
from duoka.strategies import create
from duoka.view.collectives import Collectives
from duoka.view.draws import OwnStream
from duoka.view.view import View

INTERCEPTIONS = (modules, norm, autograd, hooks, constructors, transforms, optimizers)  # as in a plain script


@dataclass(frozen=True, slots=True)
class Settings:
    """What may give other numbers than one device: the options of `duoka run` of the same names.

    compress: what goes between ranks for gradients.
    """

    batch_norm: BatchNorm = "whole"
    randomness: Randomness = "whole"
    loading: Loading = "auto"
    compress: str = "none"


@dataclass(frozen=True)
class ApiSession(Session):
    """The session of a script that knows of ranks."""

    boundary: ApiBoundary
    passes: Passes


def open_session(ranks: Collectives, settings: Settings, entropy: int, say: Callable[[str], None]) -> ApiSession:
    """Install the interceptions, which `session.patches.undo()` puts back. With one rank there is none."""
    strategy = create("single" if ranks.world_size == 1 else "ddp", ranks, settings.compress)
    view = View(ranks, strategy.adopt, say)
    own_stream = OwnStream(entropy + ranks.rank)
    boundary = ApiBoundary(view, own_stream, settings.randomness == "whole", settings.batch_norm == "whole")
    patches = Patches()
    passes = Passes(ranks, settings.batch_norm == "local", say)
    strategy.observe(passes)
    caller = Caller(patches, ranks)
    session = ApiSession(settings, ranks, view, boundary, strategy, patches, caller, entropy, say, passes)
    if ranks.world_size > 1:
        for interception in INTERCEPTIONS:
            interception.install(session)
        weights.install(session.patches, boundary)
    return session
