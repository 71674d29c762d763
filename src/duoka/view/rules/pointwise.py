"""Operations on each element by itself, with broadcasting: rows stay where they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from duoka.view.batch import BatchTensor, Rule, Spec
from duoka.view.rules.lookup import Function, functions, getters, localise, same_rows

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
logsigmoid hardshrink softshrink tanhshrink float double half bfloat16 long int short bool byte char to cpu cuda
type_as clone detach contiguous pin_memory ones_like zeros_like full_like empty_like cfloat cdouble chalf sigmoid
tanh fill zero copy __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
__floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __lshift__
__rlshift__ __rshift__ __rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__
__rxor__
"""

OPERATORS_IN_PLACE = """
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
__ilshift__ __irshift__
"""
IN_PLACE = " ".join(f"{name}_" for name in NAMES.split() if not name.startswith("__")) + OPERATORS_IN_PLACE


def pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on own rows; a plain operand of the batch's size is cut."""
    values = (*args, *kwargs.values())
    if func in _CONVERSIONS and not isinstance(args[0], BatchTensor):  # only asks for the other's type and device
        return func(*(_typed_like(value) for value in args), **kwargs)
    spec, right = None, 0
    for value in values:
        if isinstance(value, BatchTensor) and _place(value) > right:
            spec, right = value._spec, _place(value)
    return NotImplemented if spec is None else _rows_of(func, args, kwargs, spec, right)


def _place(batch: BatchTensor) -> int:
    """The batch dimension, counted from the right."""
    return batch._rows.dim() - batch._spec.dim


def _rows_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, right: int) -> Any:
    """The operation on the rows of one batch; a batch in another dimension (`y[None, :]`) meets them whole."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, BatchTensor) and not (_place(value) == right and same_rows(value._spec, spec)):
            value = value.full_tensor()
        return localise(value, spec, right)

    try:
        out = func(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    except LookupError:
        return NotImplemented
    if not isinstance(out, Tensor):  # where(condition) gives indices
        return NotImplemented
    return BatchTensor(out, spec.at(out.dim() - right))


_CONVERSIONS = (Tensor.to, Tensor.type_as)


def _typed_like(value: Any) -> Any:
    return value._local if isinstance(value, BatchTensor) else value


def in_place(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As pointwise, into own rows. Rows written into a plain tensor are gathered instead."""
    if not isinstance(args[0], BatchTensor):
        return NotImplemented
    done = _rows_of(func, args, kwargs, args[0]._spec, _place(args[0]))
    return done if done is NotImplemented else args[0]


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(NAMES), pointwise),
    **dict.fromkeys(getters("real imag"), pointwise),
    **dict.fromkeys(functions(IN_PLACE), in_place),
}
