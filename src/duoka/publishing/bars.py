"""Publish the state of progress bars of tqdm and rich, at most ten times a second."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher

EVERY = 0.1  # seconds
MOST = 4  # bars
LONGEST = 40  # characters of a name

Bar = dict[str, Any]  # name, done, total, rate (a second, or None)


def install_tqdm(publisher: Publisher, module: Any) -> None:
    """Observe all bars of tqdm, from the outermost."""
    there: weakref.WeakSet[Any] = weakref.WeakSet()

    def shown(now: Any) -> Iterable[Bar]:
        there.add(now)
        for bar in list(there):
            if bar.disable or not bar.total:  # closed, or without a total
                there.discard(bar)
        for bar in sorted(there, key=lambda bar: abs(getattr(bar, "pos", 0))):
            seconds = time.time() - bar.start_t
            done = bar.n - bar.initial
            yield _bar(bar.desc, bar.n, bar.total, done / seconds if seconds > 0 and done > 0 else None)

    for name in ("refresh", "close"):  # refresh: by `update` and the loop, as often as it is drawn
        _observe(publisher, module.tqdm, name, shown)


def install_rich(publisher: Publisher, module: Any) -> None:
    """Observe the tasks of rich's progress displays."""

    def shown(progress: Any) -> Iterable[Bar]:
        for task in progress.tasks:
            if task.total and task.visible and not task.finished:
                seconds = task.elapsed or 0.0
                rate = task.completed / seconds if seconds > 0 and task.completed > 0 else None
                yield _bar(task.description, task.completed, task.total, rate)

    for name in ("advance", "update", "stop"):
        _observe(publisher, module.Progress, name, shown)


def _bar(name: Any, done: float, total: float, rate: float | None) -> Bar:
    return {"name": str(name or "").strip(" :")[:LONGEST], "done": done, "total": total, "rate": rate}


def _observe(publisher: Publisher, owner: Any, name: str, shown: Callable[[Any], Iterable[Bar]]) -> None:
    """Write the bars after each call of a method, unless they were written just before."""
    original, written = getattr(owner, name), 0.0

    @wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal written
        result = original(self, *args, **options)
        now = time.monotonic()
        if publisher.active and (now - written >= EVERY or name in ("close", "stop")):
            written = now
            with suppress(Exception):  # the script must not see it
                publisher.show(bars=list(shown(self))[:MOST])
        return result

    setattr(owner, name, method)
