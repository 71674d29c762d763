"""What programs of gym's days ask of it, by gymnasium; environments are seeded, so that two runs can be compared."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

__all__ = ["make", "spaces"]


def make(*args: Any, **kwargs: Any) -> Any:
    kwargs.pop("autoreset", None)
    env = gymnasium.make(*args, **kwargs)
    env.reset(seed=0)
    return env
