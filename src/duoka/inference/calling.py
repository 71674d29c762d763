"""Map a batch to the arguments of a model's `forward`, by its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from duoka.errors import AskedError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Calling:
    """Calls a model with a batch.

    A dict becomes keyword arguments if forward takes these names. Of a tuple or list, forward gets as many items as
    it needs, so labels after the inputs are dropped. `inputs`, a function from a batch to the arguments, overrides
    this.
    """

    def __init__(self, model: nn.Module, inputs: Callable[[Any], Any] | None = None) -> None:
        self.inputs = inputs
        self.needed, self.most, self.names = _signature(model)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch.

        Raises:
            AskedError: the number of items in the batch does not match `forward`.
        """
        if self.inputs is not None:
            return _given(model, self.inputs(batch))
        if isinstance(batch, Mapping):
            by_name = self.names is None or set(batch) <= self.names
            return model(**batch) if by_name else model(batch)
        if isinstance(batch, (tuple, list)) and not all(isinstance(part, (str, bytes)) for part in batch):
            return model(*batch[: self._parts(batch)])
        return model(batch)

    def _parts(self, batch: Any) -> int:
        """Return how many items of a tuple the model gets."""
        if len(batch) == self.needed or self.most is None:
            return len(batch)
        if len(batch) > self.needed == self.most:
            return self.needed
        takes = f"{self.needed}" if self.needed == self.most else f"{self.needed} to {self.most}"
        raise AskedError(
            f"a batch has {len(batch)} parts, and forward takes {takes}; say which it gets, "
            "for example inputs=lambda batch: batch[0]"
        )


def _given(model: nn.Module, chosen: Any) -> Any:
    if isinstance(chosen, Mapping):
        return model(**chosen)
    return model(*chosen) if isinstance(chosen, tuple) else model(chosen)


def _signature(model: nn.Module) -> tuple[int, int | None, set[str] | None]:
    """Return the required and maximum number of positional arguments, and the names; None if unlimited."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return 0, None, None
    kinds = {parameter.kind for parameter in parameters}
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    needed = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    most = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional)
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else {parameter.name for parameter in parameters}
    return needed, most, names
