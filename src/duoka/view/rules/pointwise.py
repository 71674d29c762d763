"""Rules for element-wise operations, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.hardware.vendors import TYPES
from duoka.view.memory import same_memory
from duoka.view.rules.lookup import align, functions, getters, localise, ndim_of, rows_in, same_rows, shape_of, wrap
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec

NAMES = """
arccos arcsin arctan arccosh arcsinh arctanh fix conj_physical resolve_conj resolve_neg isreal bessel_j0 bessel_j1
bessel_y0 bessel_y1 spherical_bessel_j0 abs absolute neg negative positive sign sgn sqrt rsqrt square exp exp2 expm1
log log10 log1p log2 sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv
reciprocal floor ceil round trunc frac lgamma digamma gammaln psi multigammaln i0 i0e i1 i1e entr ndtr ndtri
log_ndtr erfcx expit sinc deg2rad rad2deg angle conj real imag isnan isinf isfinite isposinf isneginf signbit
nan_to_num add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub
atan2 arctan2 hypot nextafter gcd lcm igamma igammac gammainc gammaincc zeta xlog1py complex polar copysign xlogy
logaddexp logaddexp2 maximum minimum fmax fmin heaviside ldexp lerp addcmul addcdiv eq ne lt le gt ge not_equal less
less_equal greater greater_equal isclose bitwise_left_shift bitwise_right_shift logical_and logical_or logical_xor
logical_not bitwise_and bitwise_or bitwise_xor bitwise_not clamp clamp_min clamp_max clip where masked_fill
threshold relu relu6 leaky_relu gelu silu elu selu celu mish softplus softsign hardtanh hardsigmoid hardswish
logsigmoid hardshrink softshrink tanhshrink float double half bfloat16 long int short bool byte char to cpu
type_as clone detach pin_memory ones_like zeros_like full_like empty_like cfloat cdouble chalf sigmoid
tanh fill zero copy __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
__floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __lshift__
__rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__
__rxor__ polygamma mvlgamma frexp airy_ai modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
scaled_modified_bessel_k0 scaled_modified_bessel_k1 chebyshev_polynomial_t chebyshev_polynomial_u
chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w alias_copy detach_copy
"""

OPERATORS_IN_PLACE = """
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
"""
IN_PLACE = " ".join(f"{name}_" for name in NAMES.split() if not name.startswith("__")) + OPERATORS_IN_PLACE


def pointwise(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute an operation on the local rows; a plain operand of the batch's size is split."""
    values = (*args, *kwargs.values())
    if func in CONVERSIONS:  # only read the type and device of the other
        out = func(*map(_part_of, args), **{name: _part_of(value) for name, value in kwargs.items()})
        return BatchTensor(out, args[0]._spec)
    spec, right = None, 0
    for value in values:
        if isinstance(value, BatchTensor) and _from_right(value) > right:
            spec, right = value._spec, _from_right(value)
    return NotImplemented if spec is None else _rows_of(func, args, kwargs, spec, right)


def _from_right(batch: BatchTensor) -> int:
    """Return the batch dimension, counted from the right."""
    return batch._rows.dim() - batch._spec.dim


def _has_rows_at(batch: BatchTensor, spec: Spec, right: int) -> bool:
    """Return True if a batch has the rows of `spec` in the dimension `right` from the right."""
    return _from_right(batch) == right and same_rows(batch._spec, spec)


def _rows_of(func: Function, args: Args, kwargs: Kwargs, spec: Spec, right: int) -> Any:
    """Compute an operation on the local rows, placed as in `spec`. right: the batch dimension, from the right."""
    out = _on_rows(func, args, kwargs, spec, right)
    if func in _GIVING_TWO:
        return wrap(out, spec.at(out[0].dim() - right))
    if not isinstance(out, Tensor):  # where(condition) gives indices
        return NotImplemented
    return BatchTensor(out, spec.at(out.dim() - right))


def _on_rows(func: Function, args: Args, kwargs: Kwargs, spec: Spec, right: int) -> Any:
    """Call a function with the local rows of `spec`.

    A batch that has other rows, or has them in another dimension (`y[None, :]`), is gathered.
    """

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, BatchTensor) and not _has_rows_at(value, spec, right):
            value = value.full_tensor()
        return localise(value, spec, right)

    return func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})


_GIVING_TWO = functions("frexp")


CONVERSIONS = (Tensor.to, Tensor.type_as)


def _part_of(value: Any) -> Any:
    return value._local if isinstance(value, BatchTensor) else value


def in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """As pointwise, writing to the local rows. Rows that are written to a plain tensor are gathered."""
    batch = args[0]
    if not isinstance(batch, BatchTensor):
        return NotImplemented
    spec, right = batch._spec, _from_right(batch)
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, BatchTensor)]
    # On one device `x.copy_(x.T)` reads what it has written, or raises: a copy gathered before would do neither.
    if any(not _has_rows_at(other, spec, right) and same_memory(other._rows, batch._rows) for other in others):
        return NotImplemented
    _on_rows(func, args, kwargs, spec, right)
    return batch


def looked_up(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """bucketize, isin and searchsorted of one sequence: each entry among replicated values."""
    index = 1 if func is torch.searchsorted or func in _SEARCHES else 0
    if len(args) < 2 or not isinstance(args[index], BatchTensor):
        return NotImplemented
    batch, values = args[index], args[1 - index]
    if any(isinstance(value, Tensor) for value in (*args[2:], *kwargs.values())):
        return NotImplemented
    if kwargs.get("assume_unique"):  # torch sorts all values: where some are equal, the result depends on the others
        return NotImplemented
    if isinstance(values, Tensor) and index == 1 and ndim_of(values) > 1:
        return _in_sequences_of_rows(func, args, kwargs)
    gathered = values.full_tensor() if isinstance(values, BatchTensor) else values
    sides = (batch._local, gathered) if index == 0 else (gathered, batch._local)
    return BatchTensor(func(*sides, *args[2:], **kwargs), batch._spec)


_SEARCHES = functions("searchsorted", (torch,))


def _in_sequences_of_rows(func: Function, args: Args, kwargs: Kwargs) -> Any:
    spec = args[1]._spec
    if spec.dim == ndim_of(args[1]) - 1:
        return NotImplemented
    return BatchTensor(func(rows_in(args[0], spec, spec.dim), args[1]._local, *args[2:], **kwargs), spec)


def compared(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """equal and allclose: True if they are on every rank."""
    spec, right = align(args[:2])
    if len(args) < 2:
        return NotImplemented
    if func in _EQUAL and shape_of(args[0]) != shape_of(args[1]):
        return False
    same = func(*(localise(side, spec, right) for side in args[:2]), *args[2:], **kwargs)
    device = args[0]._rows.device if isinstance(args[0], BatchTensor) else args[0].device
    return bool(spec.view.ranks.all_reduce(torch.tensor(int(same), device=device), ReduceOp.MIN).item())


_EQUAL = functions("equal", (Tensor, torch))


def contiguous(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.contiguous()`."""
    return BatchTensor(func(args[0]._local, *args[1:], **kwargs), args[0]._spec)


RULES: dict[Function, Rule] = {
    Tensor.contiguous: contiguous,
    **dict.fromkeys(functions(f"{NAMES} {' '.join(TYPES)}"), pointwise),
    **dict.fromkeys(getters("real imag"), pointwise),
    **dict.fromkeys(functions("bucketize isin searchsorted", (torch,)), looked_up),
    **dict.fromkeys(functions("equal allclose", (Tensor, torch)), compared),
    **dict.fromkeys(functions(IN_PLACE), in_place),
}
