"""Runs with a fault in them, and what is expected of each."""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.flows.faults.leftovers import Leftovers
from tests.flows.flow import Flow, Result

HERE = Path(__file__).parent
STEPS = 12
LIMITS = ("--timeout", "30", "--step-timeout", "2")
LIMITS_THAT_ADAPT = ("--timeout", "30")


@dataclass(frozen=True)
class Expected:
    """What a run with a fault comes to: its exit code, words of its report, and whether they name the rank."""

    code: int
    words: str
    names: bool = True


ENDS = {
    "abort": Expected(134, "ended by SIGABRT"),
    "child": Expected(1, "ValueError: injected"),
    "dies-at-exit": Expected(137, "ended by SIGKILL.* after its script had ended"),
    "exit-3": Expected(3, "exited with code 3"),
    "exit-0": Expected(1, r"rank \d of \d \(.*\) left"),
    "files": Expected(1, "Too many open files"),
    "interrupt": Expected(130, "KeyboardInterrupt"),
    "kill": Expected(137, "ended by SIGKILL"),
    "memory": Expected(1, "memory ran out"),
    "os-exit-1": Expected(1, "exited with code 1 without ending python"),
    "raise": Expected(1, "ValueError: injected"),
    "raise-die": Expected(137, "ValueError: injected"),
    "raise-stay": Expected(1, "ValueError: injected"),
    "segfault": Expected(139, "ended by SIGSEGV"),
}
FROM_OUTSIDE = {
    "command-hup": Expected(129, "^duoka: stopped", names=False),
    "command-int": Expected(130, "^duoka: interrupted", names=False),
    "command-int-int": Expected(130, "^duoka: interrupted; .* had to be ended by force", names=False),
    "command-kill": Expected(137, "^$", names=False),
    "command-term": Expected(143, "^duoka: stopped", names=False),
}
AT_EXIT = {"atexit": Expected(0, "ValueError: injected", names=False)}
HANGS = {
    "lock": Expected(1, r"has not joined \w+ .*it is in injector.py:\d+"),
    "sleep": Expected(1, r"has not joined \w+ .*it is in injector.py:\d+, asleep"),
    "stop": Expected(1, r"is stopped \(SIGSTOP\)"),
}
APART = {"order": Expected(1, "called different collectives")}
ONLY_PLAIN = {
    "break": Expected(1, "left in step"),
    "loader": Expected(1, "OSError: injected in loader"),
    "worker-dies": Expected(1, "DataLoader worker .* killed"),
    "worker-raises": Expected(1, "OSError: injected in worker"),
}
ONLY_RANKED = {"break": Expected(1, "called different collectives|left in step")}
FINE = {name: Expected(0, "") for name in ("none", "slow", "work")}
CATALOGUE = {
    "plain": ENDS | FROM_OUTSIDE | AT_EXIT | HANGS | APART | ONLY_PLAIN | FINE,
    "ranked": ENDS | FROM_OUTSIDE | AT_EXIT | HANGS | APART | ONLY_RANKED | FINE,
}


@dataclass(frozen=True)
class Injection:
    """One run: its script, its fault with the rank and the step (-1: before the first), its workers, and theirs."""

    script: str
    fault: str
    rank: int
    step: int
    workers: int
    loader_workers: int = 0

    @classmethod
    def of(cls, script: str, fault: str, rank: int, step: int, workers: int) -> Injection:
        """With a loader's worker, if that is where the fault is."""
        return cls(script, fault, rank, step, workers, loader_workers=int(fault.startswith("worker-")))

    @classmethod
    def draw(cls, draws: random.Random, faults: Any = None) -> Injection:
        script = draws.choice(sorted(CATALOGUE))
        fault = draws.choice(sorted(faults or set(CATALOGUE[script]) - set(FINE)))
        workers = draws.choice((2, 3))
        # A limit that is tight holds after the first step, and some faults are in the loop.
        first = 1 if fault in HANGS else 0 if fault in {**ONLY_PLAIN, **APART, **FINE} else -1
        one = cls.of(script, fault, draws.randrange(workers), draws.randrange(first, STEPS), workers)
        more = script == "plain" and fault != "loader" and draws.random() < 1 / 3
        return replace(one, loader_workers=1) if more else one

    def __str__(self) -> str:
        loader = f", {self.loader_workers} loader workers"
        return f"{self.script} {self.fault}@{self.rank}:{self.step} of {self.workers}{loader}"


@dataclass(frozen=True)
class Outcome:
    """What a run came to. seconds: from the fault to the end, less the limit of a hang."""

    injection: Injection
    result: Result
    truth: dict[str, Any] | None
    seconds: float
    left: list[str]

    @property
    def wrong(self) -> str:
        """What is not as it should be; empty if all is."""
        expected = CATALOGUE[self.injection.script][self.injection.fault]
        if self.result.returncode != expected.code:
            return f"exit code {self.result.returncode}"
        if not expected.words:
            return self.result.stderr
        if re.search(expected.words, self.result.stderr) is None:
            return f"not told: {expected.words}"
        if self.result.stderr.count("Traceback") > 2:  # a loader worker's own is in its rank's
            return "more than one error"
        return "" if not expected.names or self._names_the_rank() else "another rank is named"

    def _names_the_rank(self) -> bool:
        headline = next(line for line in self.result.stderr.splitlines() if line.startswith("duoka: "))
        named = re.search(r"rank (\d+) of", headline)
        assert self.truth is not None
        if (
            "different collectives" in headline
        ):  # which of two went astray cannot be told, nor while only two are there
            return self.injection.workers == 2 or f"rank {self.truth['rank']}" in headline
        return named is not None and int(named[1]) == self.truth["rank"]


def inject(flow: Flow, injection: Injection) -> Outcome:
    """Run a script with this fault in it."""
    folder = flow.folder / "run"
    folder.mkdir(parents=True)
    temporary = Path(tempfile.mkdtemp())  # a socket's path in it may not be long
    truth = folder / "truth"
    leftovers = Leftovers(temporary)
    word = f"{injection.fault}@{injection.rank}:{injection.step}"
    script = HERE / f"{injection.script}.py"
    limits = LIMITS_THAT_ADAPT if injection.fault == "work" else LIMITS
    words: list[str | Path] = ["run", "-q", "--devices", f"cpu:{injection.workers}", "--log-dir", "logs", *limits]
    running = flow.start(
        [*words, script, str(STEPS), str(injection.loader_workers), word],
        cwd=folder,
        env={"DUOKA_TRUTH": str(truth), "TMPDIR": str(temporary)},
        timeout=40,
    )
    try:
        result = running.wait()
    except AssertionError as error:  # not over in time, or a process is left behind
        result = Result(-1, "", str(error))
    end = time.monotonic()
    told = json.loads(truth.read_text()) if truth.exists() else None
    limit = 2.0 if injection.fault in HANGS else 0.0
    seconds = end - told["time"] - limit if told else 0.0
    left = leftovers.left(told["listening"] if told else [])
    shutil.rmtree(temporary)
    return Outcome(injection, result, told, seconds, left)
