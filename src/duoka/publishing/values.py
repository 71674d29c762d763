"""Values that the script gives to TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher


def install_tensorboard(publisher: Publisher, module: Any) -> None:
    """Observe `SummaryWriter.add_scalar` and `add_scalars`."""

    def scalar(writer: object, tag: str, scalar_value: object, global_step: object = None, *args: object) -> None:
        _log(publisher, global_step, {tag: scalar_value})

    def scalars(
        writer: object, main_tag: str, tag_scalar_dict: Any, global_step: object = None, *args: object
    ) -> None:
        _log(publisher, global_step, {f"{main_tag}/{name}": one for name, one in tag_scalar_dict.items()})

    _observe(module.SummaryWriter, "add_scalar", scalar)
    _observe(module.SummaryWriter, "add_scalars", scalars)


def install_wandb(publisher: Publisher, module: Any) -> None:
    """Observe `wandb.log`, which is a method of the run."""

    def log(run: object, data: Any, step: object = None, *args: object, **options: object) -> None:
        _log(publisher, step, data)

    _observe(module.Run, "log", log)


def _observe(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of a method after each call."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        with suppress(Exception):  # the script must not see it
            note(*args, **{name: one for name, one in options.items() if name not in ("walltime", "new_style")})
        return result

    setattr(owner, name, method)


def _log(publisher: Publisher, step: object, values: Mapping[str, object]) -> None:
    if publisher.active:
        found = {name: _number(value) for name, value in values.items()}
        publisher.board.script_output.log(step if isinstance(step, int) else None, found)


def _number(value: Any) -> object:
    """Return a number that this rank can read by itself, as a float; anything else as it is."""
    torch = sys.modules["torch"]
    if type(value) is torch.Tensor and value.numel() == 1:  # another type may need the other ranks
        return value.item()
    return float(value) if type(value).__module__ == "numpy" else value
