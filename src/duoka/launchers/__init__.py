"""How workers come to life.

    inline.py   one worker, in the command process itself
    local.py    several on this machine or on several, or one that may be started again: forked from the command
                process of their machine and watched by it

What local.py is made of: signals, output (log files), birth (the fork), crew (the workers from outside), heir
(should the command process be killed), stuck (who is waited for), verdict (why a run ended), restarts (whether
it begins again), report and hints (what a person reads), processes and stacks (what the kernel and faulthandler
tell), joining (several machines meet), machines (what their commands tell each other) and talk (how).
"""

from __future__ import annotations

from importlib import import_module

from duoka.plan import Plan

# name -> (module, function from a plan to an exit code)
LAUNCHERS = {
    "inline": ("duoka.launchers.inline", "run_inline"),
    "local": ("duoka.launchers.local", "run_local"),
}


def launch(plan: Plan) -> int:
    """Run what was planned, and return the exit code.

    Raises:
        AskedError: something that was asked for cannot be had.
        WorkerFailed: a worker cannot be started.
    """
    module, function = LAUNCHERS["inline" if plan.is_for_one and not plan.restarts else "local"]
    code: int = getattr(import_module(module), function)(plan)
    return code
