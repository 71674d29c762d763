"""Operations on each element by itself, with broadcasting: rows stay where they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from duoka.view.batch import BatchTensor, Rule
from duoka.view.rules.lookup import Function, align, functions, localise

NAMES = """
abs absolute neg negative positive sign sgn sqrt rsqrt square exp exp2 expm1 log log10 log1p log2 sin cos tan asin
acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv reciprocal floor ceil round trunc frac
lgamma digamma sinc deg2rad rad2deg angle conj real imag isnan isinf isfinite isposinf isneginf signbit nan_to_num
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub atan2 arctan2
hypot copysign xlogy logaddexp logaddexp2 maximum minimum fmax fmin heaviside ldexp lerp addcmul addcdiv
eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
clamp clamp_min clamp_max clip where masked_fill threshold
relu relu6 leaky_relu gelu silu elu selu celu mish softplus softsign hardtanh hardsigmoid hardswish logsigmoid
hardshrink softshrink tanhshrink
float double half bfloat16 long int short bool byte char to cpu cuda type_as clone detach contiguous pin_memory
ones_like zeros_like full_like empty_like new_tensor_like
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
"""

IN_PLACE = """
add_ sub_ mul_ div_ pow_ neg_ abs_ exp_ log_ sqrt_ rsqrt_ square_ sigmoid_ tanh_ relu_ clamp_ clamp_min_ clamp_max_
clip_ round_ floor_ ceil_ zero_ fill_ masked_fill_ copy_ lerp_ addcmul_ addcdiv_ logical_and_ logical_or_ logical_not_
nan_to_num_ reciprocal_ sin_ cos_ erf_ sign_ remainder_ fmod_ detach_ leaky_relu_ elu_
__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
"""


def pointwise(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on own rows; a plain operand of the batch's size is cut."""
    values = (*args, *kwargs.values())
    if func in _CONVERSIONS and not isinstance(args[0], BatchTensor):  # only asks for the other's type and device
        return func(*(_typed_like(value) for value in args), **kwargs)
    common = align(values)
    if common is None or isinstance(kwargs.get("out"), Tensor):
        return NotImplemented
    spec, right = common
    try:
        out = func(
            *(localise(value, spec, right) for value in args),
            **{name: localise(value, spec, right) for name, value in kwargs.items()},
        )
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
    done = pointwise(func, args, kwargs)
    return done if done is NotImplemented else args[0]


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(NAMES), pointwise),
    **dict.fromkeys(functions(IN_PLACE), in_place),
}
