"""One module call, made for each own share: all begin with the same, and together they leave what one call leaves.

All but one are rehearsals: what they leave in attributes, buffers and random generators is put back, and what they
print is not seen.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

from torch import Tensor, nn

from duoka.errors import Refused
from duoka.view.draws import random_states, same_states, set_random_states
from duoka.view.lent import version
from duoka.view.site import user_line
from duoka.view.traceless import traceless


class Repeating:
    """The calls of one module for its own shares. traces: whether a call is known to leave something behind."""

    def __init__(self, module: nn.Module, traces: bool) -> None:
        self._module, self._traces = module, traces
        self._states = random_states()
        self._after: tuple[object, ...] | None = None
        self._tensors: list[Tensor] = [*module.buffers(), *module.parameters()]

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Around a call of which nothing is to remain."""
        versions = list(map(version, self._tensors))
        before = [buffer.clone() for buffer in self._module.buffers()] if self._traces else []
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(io.StringIO()))
            if self._traces:
                stack.enter_context(traceless(self._module))
            yield
            self._ends()
        if not same_states(self._states, random_states()):
            set_random_states(self._states)
        for buffer, values in zip(self._module.buffers(), before, strict=False):
            buffer.copy_(values)
        if not self._traces and versions != list(map(version, self._tensors)):
            raise Refused(
                f"{type(self._module).__name__} at {user_line()} writes into its parameters or buffers, as it "
                "did not in its first calls; --strategy exact would do it once for each share"
            )

    @contextmanager
    def last(self) -> Iterator[None]:
        """Around the call whose traces remain."""
        yield
        self._ends()

    def _ends(self) -> None:
        """One of the calls is over: all must have drawn the same random numbers."""
        after = random_states()
        if self._after is not None and not same_states(self._after, after):
            raise Refused(
                f"{type(self._module).__name__} at {user_line()} draws other random numbers for other samples, which "
                "--strategy exact cannot compute share by share"
            )
        self._after = after
