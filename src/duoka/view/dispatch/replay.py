"""Record the torch calls that a rule makes on local tensors, and repeat them without the rule.

A rule depends on the function, on placements, shapes and types of tensors, and on the other arguments, but not on
the values of tensors. These make up a *key*. The second call with a key runs the rule under a `Recorder`. If the rule
only called torch functions on local tensors, the calls are compiled into a *program*, which later calls with the key
run instead. A sum over all ranks and a draw can be among these calls (`Recorder.calling`). A rule that does anything
else (another collective, reading a value) runs each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from duoka.hardware.vendors import TYPES
from duoka.private.torch import WithoutTorchFunctions
from duoka.view.shares.local import Outdated
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Function,
    Kwargs,
    MultiShareBatch,
    Traits,
    batches_in,
    may_write,
)
from duoka.view.tensor.spec import Meta
from duoka.view.view import View

Program = Callable[[list[Any], list[BatchTensor]], Any]  # (inputs, batches) of a call -> its result

_METADATA = """
shape size dim ndim ndimension numel nelement dtype device layout itemsize element_size __len__ is_floating_point
is_complex is_sparse is_quantized is_nested is_meta is_cpu stride is_contiguous is_conj is_neg requires_grad is_leaf
"""  # determined by the key, but for the last two of rows, and `is_leaf`, by which only `View.replicate` decides
# What a rule decides by of a plain tensor: attributes, and methods without arguments.
PLAIN = ("shape", "dtype", "stride", "requires_grad")
_DETERMINED = frozenset((*_METADATA.split(), *(f"is_{name}" for name in TYPES)))
CONSTANTS = frozenset({str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format})
TRUE, FALSE, LIST, TUPLE = object(), object(), object(), object()
Expression = tuple[Any, ...]  # (kind, object, parts), of a CALL also the names of the last parts; as in _replay.c
INPUT, BATCH, OUTPUT, ITEM, CONSTANT, SEQUENCE, DICT, MADE, CALL = range(9)
_BUILTIN: dict[Any, Any] = {F.layer_norm: torch.layer_norm}  # what a function in Python does nothing but call


class Unkeyed(Exception):
    """An argument has a type that cannot be part of a key."""


class DescribedCall:
    """A call: a key, equal for calls for which a rule does the same, and the inputs that vary between these."""

    __slots__ = ("args", "batches", "func", "inputs", "key", "kwargs", "plain")

    def __init__(self, func: Function, args: Args, kwargs: Kwargs) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.inputs: list[Any] = []  # local tensors of batches, or batches of several shares, other tensors, floats
        self.plain: list[int] = []  # the indices of the other tensors
        self.batches: list[BatchTensor] = []
        key: list[Any] = [func]
        try:
            for value in args:  # the usual types are handled here, as a call costs microseconds
                kind = type(value)
                if kind is BatchTensor:
                    key.append(value._meta)
                    self.inputs.append(value._rows)
                    self.batches.append(value)
                else:
                    self._add(value, kind, key)
            if kwargs:
                self._add(kwargs, dict, key)
            places = {id(value): index for index, value in enumerate(self.inputs)}
            if len(places) < len(self.inputs):  # the same tensor several times: part of the key
                key += [places[id(value)] for value in self.inputs]
            self.key: tuple[Any, ...] | None = tuple(key)
        except (Unkeyed, RuntimeError):  # RuntimeError: a sparse tensor has no strides
            self.key = None  # the rule runs each time
            self.batches = batches_in((args, kwargs))

    @property
    def view(self) -> View:
        """That of the first batch."""
        return self.batches[0]._meta.spec.view

    @property
    def traits(self) -> Traits:
        """What is known of the function's rule."""
        return BatchTensor.traits_of(self.func)

    def may_write(self) -> bool:
        """Return True if the function may write to its arguments."""
        return may_write(self.func, self.kwargs)

    def _add(self, value: Any, kind: type, key: list[Any]) -> None:
        """Add an argument to key and inputs.

        Raises:
            Unkeyed: it has an unknown type.
        """
        if kind in CONSTANTS:
            key.append(value)
        elif kind is int:
            key.append(value)
            key.append(int)
        elif kind is bool:
            key.append(TRUE if value else FALSE)
        elif kind is BatchTensor:
            key.append(value._meta)
            self.inputs.append(value._rows)
            self.batches.append(value)
        elif kind is MultiShareBatch:
            key += [share._meta for share in value._by_share]
            self.inputs.append(value)
            self.batches.append(value)
        elif kind is float or kind is complex:
            key.append(kind)
            key.append(value if value in (0, 1) else None)  # a probability for which nothing is drawn
            self.inputs.append(value)
        elif kind is Tensor or kind is nn.Parameter:
            for name in PLAIN:
                attribute = getattr(value, name)
                key.append(attribute() if callable(attribute) else attribute)
            self.plain.append(len(self.inputs))
            self.inputs.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append(LIST if kind is list else TUPLE)
            key.append(len(value))
            for item in value:
                self._add(item, type(item), key)
        elif kind is slice:
            key.append(slice)
            for item in (value.start, value.stop, value.step):
                if type(item) is not int and item is not None:
                    raise Unkeyed
                key.append(item)
        elif kind is dict:
            key.append(dict)
            for name, item in value.items():
                key.append(name)
                self._add(item, type(item), key)
        else:
            raise Unkeyed


class Recorder(TorchFunctionMode):
    """Record the torch calls in a context on `inputs`, local tensors and floats, each a distinct object."""

    def __init__(self, inputs: list[Any], interactions: Callable[[], int]) -> None:
        super().__init__()
        self._known: dict[int, Expression] = {id(value): (INPUT, index, ()) for index, value in enumerate(inputs)}
        self._count = len(inputs)
        self._kept: list[Any] = list(inputs)  # so that ids stay unique
        self._calls: list[Expression] = []
        self._without_values: set[int] = set()  # calls with a result on "meta", whose computation has no effect
        self._sound = True
        self._entered = self._calling = False
        self._interactions = interactions  # returns how many there have been so far (`View.interactions`)
        self._unrecorded = interactions()  # plus those that are part of the record

    def start(self) -> None:
        """Start recording."""
        self.__enter__()
        self._entered = True

    def stop(self) -> None:
        """Stop recording."""
        if self._entered:
            self._entered = False
            self.__exit__(None, None, None)

    def abandon(self) -> None:
        """Discard the record: the rule communicates with other shares, which is not a torch call.

        During a call torch has taken the recorder off the stack of modes, which all shares use.
        """
        self._sound = False
        if not self._calling:
            self.stop()

    def calling(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function, which may draw for the whole batch or call a collective, and record this as one call.

        The function counts its interactions itself, and must make the same whatever it is called with, or raise
        Outdated before the first.
        """
        before = self._interactions()
        with WithoutTorchFunctions():
            out = func(*args)
            self._note(func, args, {}, out)
        self._unrecorded += self._interactions() - before
        return out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._calling = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._calling = False
        self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Add a call and its result to the record."""
        if not self._sound or _name(func) in _DETERMINED:
            return
        self._kept.append(out)
        number, is_new = len(self._calls), id(out) not in self._known
        try:
            parts = tuple(map(self._expression, (*args, *kwargs.values())))
            self._calls.append((CALL, _BUILTIN.get(func, func), parts, tuple(kwargs)))
            self._name_outputs(out, (OUTPUT, number, ()))
        except Unkeyed:
            self._sound = False
        if is_new and isinstance(out, Tensor) and out.is_meta:
            self._without_values.add(number)

    def _expression(self, value: Any) -> Expression:
        """Return the expression for an argument.

        Raises:
            Unkeyed: its value may differ in the next call.
        """
        if id(value) in self._known:
            return self._known[id(value)]
        kind = type(value)
        if kind in (tuple, list, torch.Size):
            return SEQUENCE, list if kind is list else tuple, tuple(map(self._expression, value))
        if kind is dict:
            return DICT, tuple(value), tuple(map(self._expression, value.values()))
        if isinstance(value, (Tensor, float, complex)):
            raise Unkeyed
        if kind in (slice, bool, int) or kind in CONSTANTS or callable(value):
            return CONSTANT, value, ()
        raise Unkeyed

    def _name_outputs(self, out: Any, expression: Expression) -> None:
        """Note the expression for the result of a call, and for what is in it.

        Raises:
            Unkeyed: it contains what is no plain tensor.
        """
        if isinstance(out, Tensor):
            self._known[id(out)] = expression
        if isinstance(out, (tuple, list)):
            for index, item in enumerate(out):
                self._name_outputs(item, (ITEM, index, (expression,)))
        elif out is not None and type(out) not in (Tensor, nn.Parameter):
            raise Unkeyed

    def program(self, out: Any, batches: list[BatchTensor]) -> Program | None:
        """Return a function that repeats the calls and returns what the rule returned; None if that is not possible.

        out: the result of the rule. batches: those among the arguments, of which `out` may be one.
        """
        if not self._sound or self._unrecorded != self._interactions():
            return None
        try:
            result = self._result(out, batches)
        except Unkeyed:
            return None
        parts, used = [result], set(_outputs_in(result))
        for number, call in reversed([*enumerate(self._calls)]):
            is_used = number in used or number not in self._without_values
            parts.append(call if is_used else (CONSTANT, None, ()))
            used.update(_outputs_in(parts[-1]))
        made: Program = BatchTensor.program((SEQUENCE, list, tuple(reversed(parts))), self._count)
        return made

    def _result(self, out: Any, batches: list[BatchTensor]) -> Expression:
        """Return the expression for the result.

        Raises:
            Unkeyed: it contains an unknown tensor.
        """
        for index, batch in enumerate(batches):
            if out is batch:
                return BATCH, index, ()
        if type(out) is BatchTensor and id(out._rows) in self._known:
            return MADE, out._meta, (self._known[id(out._rows)],)
        if type(out) is Tensor and id(out) in self._known:
            return self._known[id(out)]
        if out is None:
            return CONSTANT, None, ()
        if not isinstance(out, (tuple, list)) or isinstance(out, torch.Size):
            raise Unkeyed
        return SEQUENCE, type(out), tuple(self._result(item, batches) for item in out)


def _outputs_in(expression: Expression) -> Iterator[int]:
    """Yield the calls whose results an expression contains."""
    kind, value, parts, *_ = expression
    if kind == OUTPUT:
        yield value
    for part in parts:
        yield from _outputs_in(part)


def in_python(program: Expression, input_count: int) -> Program:
    """Compile recorded calls to a function. program: a sequence of the calls, and the expression for the result."""
    constants: dict[str, Any] = {}

    def constant(value: Any) -> str:
        constants[name := f"c{len(constants)}"] = value
        return name

    def source(expression: Expression) -> str:
        kind, value, parts, *names = expression
        inner = [source(part) for part in parts]
        if kind in (INPUT, BATCH):
            return f"{'ib'[kind]}[{value}]"
        if kind == OUTPUT:
            return f"o{value}"
        if kind == ITEM:
            return f"{inner[0]}[{value}]"
        if kind == MADE:
            return f"{constant(BatchTensor.remake)}({inner[0]}, {constant(value)})"
        if kind == DICT:
            return f"dict(zip({constant(value)}, [{', '.join(inner)}]))"
        if kind == CALL:
            positional = len(inner) - len(names[0])
            named = [f"{name}={word}" for name, word in zip(names[0], inner[positional:], strict=True)]
            return f"{constant(value)}({', '.join(inner[:positional] + named)})"
        if kind == SEQUENCE and value is list:
            return f"[{', '.join(inner)}]"
        if kind == SEQUENCE:
            spread = "*" * hasattr(value, "_fields")  # a named tuple
            return f"{constant(value)}({spread}[{', '.join(inner)}])"
        return constant(value)

    *calls, result = program[2]
    lines = [*(f"o{number} = {source(call)}" for number, call in enumerate(calls)), f"return {source(result)}"]
    exec(compile("def program(i, b):\n    " + "\n    ".join(lines), "<duoka replay>", "exec"), constants)
    return constants["program"]  # type: ignore[no-any-return]


def remake(rows: Tensor, meta: Meta) -> BatchTensor:
    """Make a batch of the rows that a program has computed.

    Raises:
        Outdated: the rows have not the shape that the rule returned.
    """
    if rows.shape != meta.local_shape:
        raise Outdated
    if rows.dtype is not meta.dtype:  # under another autocast
        meta = Meta.of(rows, meta.spec, meta.strides)
    return BatchTensor._made(rows, meta)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    return getattr(func.__self__, "__name__", "")
