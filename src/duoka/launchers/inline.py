"""One worker, in the command process itself: nothing stands between the script and the interpreter.

So breakpoints, signals, threads, tracebacks and exit codes are what they are under `python script.py`.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

from duoka import environment, traces
from duoka.environment import Place
from duoka.errors import AskedError, DuokaError, ScriptError
from duoka.keys import Key
from duoka.plan import Kind, Plan
from duoka.target import run_target
from duoka.worker import local_rank_args, run_plain_alone, set_threads, take_place

T = TypeVar("T")


def run_inline(plan: Plan) -> int:
    """Run the script of `plan` to its end; what it raises passes through.

    Raises:
        ScriptError: the script cannot be found or read.
    """
    environment.show_cards(plan.devices)
    environment.give_threads(plan.threads)
    environment.keep_freed_memory()
    if "torch" in sys.modules:  # it has looked already
        set_threads(plan.threads)
    try:
        if plan.kind is Kind.PLAIN and plan.strategy == "exact":
            run_plain_alone(plan, secrets.randbits(64), partial(run_target, plan.target))
        elif plan.kind is Kind.PLAIN or plan.self_launching:
            run_target(plan.target)
        elif plan.kind is Kind.API:
            run_alone(plan, partial(run_target, plan.target))
        else:
            environment.give_ranks(Place(0, 1, 0, 0, secrets.token_hex(8)))
            run_target(plan.target, local_rank_args(plan, 0))
    except (SystemExit, ScriptError):
        raise
    except DuokaError as error:  # the script's own: with its lines, as it would be shown of a worker
        _show_as_python_would()
        sys.excepthook(type(error), error, error.__traceback__)
        return 2 if isinstance(error, AskedError) else 1
    except BaseException:
        _show_as_python_would()
        raise
    return 0


def run_alone(plan: Plan, function: Callable[[], T]) -> T:
    """Call what uses duoka's API in this process, as the only worker of `plan`."""
    from duoka.origins.meeting import NoSeat
    from duoka.process import this_process

    this_process.cache_clear()  # a caller of `duoka.launch` has one of its own
    place = Place(0, 1, 0, 0, secrets.token_hex(8))
    take_place(plan, place, NoSeat(), None, Key())
    with this_process().ending():
        return function()


def _show_as_python_would() -> None:
    """Let the traceback that the interpreter is about to show begin with the script."""
    show = sys.excepthook

    def show_trimmed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traces.trim(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_trimmed
