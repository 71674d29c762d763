"""Learning rates for large batches, and clipping, by torch's own schedulers and functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from duoka.errors import OptionError
from duoka.options import one_of
from duoka.process import this_process

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, batch: int, base_batch: int, rule: Rule = "linear") -> float:
    """Return the learning rate for a global batch of another size than the one it was found for.

    linear: lr * batch / base_batch, for SGD (Goyal et al. 2017, who warm it up over five epochs). sqrt:
    lr * sqrt(batch / base_batch), for Adam and the like (Malladi et al. 2022). Both hold up to a batch size that
    depends on the task (Shallue et al. 2019). The number of devices does not matter: `batch` is that of all together.

    Raises:
        OptionError: a number is not positive, or the rule is another.
    """
    one_of("rule", rule, get_args(Rule))
    for name, value in (("lr", lr), ("batch", batch), ("base_batch", base_batch)):
        if not value > 0:
            raise OptionError(name, value, "more than 0")
    ratio = batch / base_batch
    return lr * (ratio if rule == "linear" else ratio**0.5)


def warmup(optimizer: Optimizer, steps: Any, then: LRScheduler | None = None) -> LRScheduler:
    """Return a scheduler that raises the learning rate linearly over `steps` calls of `step()`, then follows `then`.

    It consists of torch's LinearLR and SequentialLR, and has their state dict. Call `step()` after each optimizer
    step, once whatever the number of devices; `then` counts its steps from the end of the warm-up.

    Raises:
        OptionError: `steps` is not positive, or `then` belongs to another optimizer or needs a metric.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise OptionError("steps", steps, "a whole number of optimizer steps, at least 1")
    if isinstance(then, ReduceLROnPlateau):
        hint = "step it by itself when the warm-up is over"
        raise OptionError("then", type(then).__name__, "a scheduler that needs no metric", hint)
    if then is not None and then.optimizer is not optimizer:
        raise OptionError("then", type(then).__name__, "a scheduler of the same optimizer")
    rise = LinearLR(optimizer, start_factor=1 / (steps + 1), total_iters=steps)
    return rise if then is None else SequentialLR(optimizer, [rise, then], milestones=[steps])


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **how: Any
) -> Tensor:
    """Clip gradients by their total norm, as `torch.nn.utils.clip_grad_norm_`; gradients are the whole batch's.

    Sharded and other gradients may be mixed; all ranks call it then. Returns the norm, a plain tensor.

    Raises:
        OptionError: a gradient is this rank's own, by `run.no_sync` or pieces of a batch.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    run = this_process().run
    if run is not None and run.has_unsynced(listed):
        hint = "clip after the first backward pass outside of no_sync, or the last piece"
        raise OptionError("clip_grad_norm_", "gradients held by no_sync", "given gradients of the whole batch", hint)
    return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type, **how)
