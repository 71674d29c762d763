"""Run one worker in the command process itself.

Breakpoints, signals, threads, tracebacks and exit codes are those of `python script.py`.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from duoka.errors import AskedError, DuokaError, ScriptError
from duoka.hardware.vendors import variables_for
from duoka.launchers.hints import memory_hints
from duoka.launchers.worker import Attempt, held_when_short, local_rank_args, run_plain_alone, set_threads
from duoka.origins.process import this_process
from duoka.planning.plan import Kind, Plan
from duoka.publishing import publish
from duoka.script.target import run_target
from duoka.supervision import tracebacks
from duoka.system import environment
from duoka.watching.record import PublishedRun


def run_inline(plan: Plan) -> int:
    """Run the script of `plan` to its end; its exceptions pass through.

    Raises ScriptError if the script does not exist or cannot be read.
    """
    # Before torch is imported, which reads them then; mostly the script does.
    environment.set_variables(variables_for(plan.devices))
    environment.set_pool_sizes(plan.threads)
    environment.keep_freed_memory()
    if "torch" in sys.modules:
        set_threads(plan.threads)
    record = PublishedRun(plan)
    board = record.begin(0, range(1))
    publisher = publish(board, 0, shows_script=True)
    record.started([os.getpid()])
    attempt = Attempt(plan, 0, secrets.token_hex(8), secrets.randbits(64), board)
    code = 1
    try:
        if plan.kind is Kind.PLAIN and plan.strategy == "exact":
            run_plain_alone(attempt, partial(run_target, plan.target))
        elif plan.kind is Kind.PLAIN or plan.self_launching:
            run_target(plan.target)
        elif plan.kind is Kind.API:
            publisher.join(this_process())
            this_process().origin = attempt.origin(attempt.rank_info(0))
            with this_process().ending():
                run_target(plan.target)
        else:
            environment.set_rank_variables(attempt.rank_info(0))
            run_target(plan.target, local_rank_args(plan, 0))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except ScriptError:  # no script has run: the command prints the message alone
        raise
    except DuokaError as error:  # raised by the script: print its traceback, as for a worker
        _show_as_python_would()
        sys.excepthook(type(error), error, error.__traceback__)
        code = 2 if isinstance(error, AskedError) else 1
        return code
    except BaseException as error:  # the interpreter prints it, and ends with the code or signal that it stands for
        headline = tracebacks.headline(error).splitlines()[-1]
        record.failed(f"the script raised {headline}")
        _show_as_python_would(memory_hints(headline, plan, held_when_short(headline)))
        raise
    finally:
        record.ended(code)
        record.close()
    return code


def _show_as_python_would(hints: Sequence[str] = ()) -> None:
    """Remove duoka's frames from the traceback that the interpreter is about to print; print lines below it."""
    show = sys.excepthook

    def show_trimmed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tracebacks.trim(error)
        show(kind, error, error.__traceback__)
        for line in hints:
            print(line, file=sys.stderr)

    sys.excepthook = show_trimmed
