"""What strategies do, which keep parameters in step on many devices; one rank needs nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from duoka.collectives.base import Collectives
from duoka.view import originals
from duoka.view.view import View

# Takes a function that returns a parameter's place in the order in which a pass reached them; None if it did not.
Observer = Callable[[Callable[[Tensor], int | None]], None]


class Strategy:
    """Keeps the parameters of all ranks in step. All ranks make the same calls, in the same order.

    This one is that of a single rank, whose parameters and gradients need no communication.
    """

    def view(self, ranks: Collectives, say: Callable[[str], None]) -> View:
        """Return the view through which this rank sees batches."""
        return View(ranks, self.adopt, say, prepare_model=self.prepare_model)

    def adopt(self, parameter: Tensor) -> None:
        """Keep `parameter` in step: equal values and gradients on every rank. Further calls do nothing.

        Three places call it, as each may be the first to see a parameter: an optimizer, maybe before any model is
        called; a model's first call, for what no optimizer has; `View.replicate`, for a leaf outside of both.
        """

    def optimize(self, parameter: Tensor) -> None:
        """Adopt a parameter that the script has given to an optimizer."""
        self.adopt(parameter)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise `Refused` if the strategy cannot work with a new optimizer of a model's parameters."""

    def own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank loads of the state dict of an optimizer."""
        return state

    def prepare_model(self, module: nn.Module) -> None:
        """Prepare the parameters of a model before it is moved to a device, or first called: `fsdp` shards them."""

    def shard(self, module: nn.Module, machines: Sequence[Sequence[int]] = ()) -> None:
        """Shard the parameters of `module` over ranks; does nothing with one rank.

        machines: the ranks of each machine, all of which hold a copy of the model; empty: there is one copy.
        """

    def backward(self, site: str) -> AbstractContextManager[None]:
        """Return a context for one backward pass; on exit, the gradients are those of the whole batch.

        Within `no_sync`, they stay local. A pass inside another one belongs to that one. site: file and line of the
        script's call.
        """
        return nullcontext()

    def read_in_pass(self) -> None:
        """Let `.grad` during a pass be what it is on one device, as the script has hooks that may read it."""

    def note_type(self, parameter: Tensor) -> None:
        """Note that a parameter's data gets another type or device: torch adds up its gradient in another node."""

    def counts_writes(self, tensor: Tensor) -> bool:
        """Return True if writes to a plain tensor must be counted, also those to its `data`."""
        return False

    def returning(self) -> AbstractContextManager[None]:
        """Return a context for a pass that returns gradients, maybe inside another one."""
        return nullcontext()

    def recording(self) -> AbstractContextManager[None]:
        """Return a context for a pass that is recorded by autograd, too (`create_graph`)."""
        return nullcontext()

    def no_sync(self, parameters: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Within the context, keep gradients of these parameters (or all) local; the next pass averages them."""
        return nullcontext()

    def register_hook(self, leaf: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook for the whole batch's gradient of a leaf."""
        return originals.register_hook(leaf, hook)

    def read_each_pass(self, parameter: Tensor) -> None:
        """Adopt a parameter whose gradient the script reads after each pass, so that `no_sync` does nothing."""
        self.adopt(parameter)

    def use_bucket_views(self, parameters: Iterable[Tensor]) -> None:
        """Let gradients of these be views of larger tensors, where that saves a copy."""

    def observe(self, observer: Observer) -> None:
        """Call `observer` at the end of each backward pass with communication, on all ranks."""

    def close(self) -> None:
        """Release all parameters."""
