"""Random numbers for the rows of a batch: drawn for the whole batch, own rows kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from duoka.view.batch import BatchTensor, Rule, Spec
from duoka.view.draws import SeededMode, draw_own_rows, shape_drawn
from duoka.view.rules.lookup import Function, align, argument, functions, localise, wrap

FRESH = """
dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu gumbel_softmax
rand_like randn_like randint_like bernoulli normal poisson multinomial binomial
"""
FILLING = "bernoulli_ normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ dropout_ alpha_dropout_"


def drawn(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random function of rows."""
    common = align((*args, *kwargs.values()))
    if common is None or isinstance(kwargs.get("out"), Tensor):
        return NotImplemented
    spec, right = common
    if not _draws_by_rows(func, args, kwargs, spec, right) or (func in _BY_VALUE and spec.view.own.exact):
        return NotImplemented

    def draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = shape_drawn(args, kwargs)
        of_rows = len(shape) > spec.dim and shape[spec.dim] == spec.local_size
        return draw_own_rows(operator, args, kwargs, spec) if of_rows else operator(*args, **kwargs)

    try:
        rows = [localise(value, spec, right) for value in args]
        named = {name: localise(value, spec, right) for name, value in kwargs.items()}
    except LookupError:
        return NotImplemented
    with SeededMode(draw):
        return wrap(func(*rows, **named), spec)


def _draws_by_rows(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, right: int) -> bool:
    """Whether a number is drawn for each entry of the first tensor, whatever the other rows are."""
    shapes = {value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
    if func is F.gumbel_softmax:
        return bool(argument(args, kwargs, 4, "dim", -1) % right != spec.dim)
    if func is F.rrelu and argument(args, kwargs, 4, "inplace"):
        return False  # it draws for those below 0 only
    if func in _OF_DISTRIBUTIONS:
        return spec.dim == 0 and right == 2
    return len(shapes) == 1


_BY_VALUE = functions("poisson binomial rrelu")  # how much they draw depends on all rows, which would have to meet
_OF_DISTRIBUTIONS = functions("multinomial")  # the last dimension is the probabilities


def filled(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random function that writes into a batch."""
    if not isinstance(args[0], BatchTensor):
        return NotImplemented
    done = drawn(func, args, kwargs)
    return done if done is NotImplemented else args[0]


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(FRESH), drawn),
    **dict.fromkeys(functions(FILLING), filled),
}
