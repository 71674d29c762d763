"""Learning rates for large batches, and clipping, by torch's own schedulers and functions."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from duoka.errors import OptionError
from duoka.planning.options import one_of

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
