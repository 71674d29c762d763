"""Record the torch calls that a rule makes on local tensors, and repeat them without the rule.

A rule depends on the function, on placements, shapes and types of tensors, and on the other arguments, but not on
the values of tensors. These make up a *key*. The second call with a key runs the rule under a `Recorder`. If the rule
only called torch functions on local tensors, the calls are compiled into a *program*, which later calls with the key
run instead. A rule that does anything else (a collective, a draw, reading a value) runs each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from duoka.devices.vendors import TYPES
from duoka.private.torch import WithoutTorchFunctions
from duoka.view.tensor.batch import BatchTensor, batches_in
from duoka.view.tensor.spec import Meta

Program = Callable[[list[Any], list[BatchTensor]], Any]  # (inputs, batches) of a call -> its result

_METADATA = """
shape size dim ndim ndimension numel nelement dtype device layout itemsize element_size __len__ is_floating_point
is_complex is_sparse is_quantized is_nested is_meta is_cpu stride is_contiguous is_conj is_neg requires_grad is_leaf
"""  # determined by the key, but for the last two of rows, and `is_leaf`, by which only `View.replicate` decides
PLAIN = (
    "shape",
    "dtype",
    "stride",
    "requires_grad",
)  # what a rule decides by of a plain tensor: attributes, methods without arguments
_DETERMINED = frozenset((*_METADATA.split(), *(f"is_{name}" for name in TYPES)))
CONSTANTS = frozenset({str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format})
TRUE, FALSE, LIST, TUPLE = object(), object(), object(), object()
_BUILTIN: dict[Any, Any] = {F.layer_norm: torch.layer_norm}  # what a function in Python does nothing but call


class Outdated(Exception):
    """The result of a program has another shape than that of the rule."""


class Unkeyed(Exception):
    """An argument has a type that cannot be part of a key."""


class DescribedCall:
    """A call of `func`, split into a key and inputs.

    key: equal for calls for which a rule does the same; None if there is no key. inputs: what varies between such
    calls, in order: local tensors of batches, other tensors, floats. plain: the indices of the other tensors in the
    inputs. batches: in order.
    """

    __slots__ = ("batches", "inputs", "key", "plain")

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs: list[Any] = []
        self.plain: list[int] = []
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
            places = {id(value): place for place, value in enumerate(self.inputs)}
            if len(places) < len(self.inputs):  # the same tensor several times: part of the key
                key += [places[id(value)] for value in self.inputs]
            self.key: tuple[Any, ...] | None = tuple(key)
        except (Unkeyed, RuntimeError):  # RuntimeError: a sparse tensor has no strides
            self.key = None
            self.batches = batches_in((args, kwargs))

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
        elif kind is float or kind is complex:
            key.append(kind)
            key.append(value if value in (0, 1) else None)  # a probability for which nothing is drawn
            self.inputs.append(value)
        elif kind is Tensor or kind is nn.Parameter:
            for name in PLAIN:
                found = getattr(value, name)
                key.append(found() if callable(found) else found)
            self.plain.append(len(self.inputs))
            self.inputs.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append(LIST if kind is list else TUPLE)
            key.append(len(value))
            for one in value:
                self._add(one, type(one), key)
        elif kind is slice:
            key.append(slice)
            for one in (value.start, value.stop, value.step):
                if type(one) is not int and one is not None:
                    raise Unkeyed
                key.append(one)
        elif kind is dict:
            key.append(dict)
            for name, one in value.items():
                key.append(name)
                self._add(one, type(one), key)
        else:
            raise Unkeyed


class Recorder(TorchFunctionMode):
    """Record the torch calls in a context, on `inputs` and on their results.

    inputs: local tensors and floats, each a distinct object.
    """

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self._known = {id(value): f"i[{place}]" for place, value in enumerate(inputs)}  # -> name in the program
        self._kept: list[Any] = list(inputs)  # so that ids stay unique
        self._lines: list[str] = []
        self._calls: list[tuple[Any, Any, Any]] = []  # of each line: function, arguments
        self._without_values: set[str] = set()  # names of results on "meta", whose computation has no effect
        self._constants: dict[str, Any] = {}
        self._sound = True
        self._entered = False
        self.draws = 0  # that are part of the record

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
        """Discard the record: the rule communicates with other shares, which is not a torch call."""
        self._sound = False
        self.stop()

    def drawing(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function that draws once for the whole batch, and record this as one call.

        The function counts its draws itself, and must do the same whatever it is called with, or raise Outdated.
        """
        self.draws += 1
        with WithoutTorchFunctions():
            return self.__torch_function__(func, (), args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._sound or _name(func) in _DETERMINED:
            return out
        self._kept.append(out)
        call = self._call(func, args, kwargs)
        name, is_new = f"o{len(self._lines)}", id(out) not in self._known
        if call is None or not self._name_outputs(out, name):
            self._sound = False
        else:
            self._lines.append(f"{name} = {call}")
            self._calls.append((_BUILTIN.get(func, func), args, kwargs))
            if is_new and isinstance(out, Tensor) and out.is_meta:
                self._without_values.add(name)
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> str | None:
        words = [self._word(value) for value in args]
        named = {name: self._word(value) for name, value in kwargs.items()}
        if None in words or None in named.values():
            return None
        given = [*words, *(f"{name}={word}" for name, word in named.items())]
        return f"{self._constant(_BUILTIN.get(func, func))}({', '.join(given)})"  # type: ignore[arg-type]

    def _word(self, value: Any) -> str | None:
        """Return the expression for an argument; None if its value may differ in the next call."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, (Tensor, float, complex)):
            return None
        if type(value) in (tuple, list, torch.Size):
            words = [self._word(one) for one in value]
            if None in words:
                return None
            inner = "".join(f"{word}, " for word in words)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        if type(value) is dict:
            items = {name: self._word(one) for name, one in value.items()}
            return None if None in items.values() else f"dict({', '.join(f'{n}={w}' for n, w in items.items())})"
        if (
            type(value) is slice
            or type(value) is bool
            or type(value) is int
            or type(value) in CONSTANTS
            or callable(value)
        ):
            return self._constant(value)
        return None

    def _name_outputs(self, out: Any, name: str) -> bool:
        if isinstance(out, Tensor):
            self._known[id(out)] = name
            return type(out) in (Tensor, nn.Parameter)
        if isinstance(out, (tuple, list)):
            return all(self._name_outputs(one, f"{name}[{place}]") for place, one in enumerate(out))
        return out is None

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def program(self, out: Any, batches: list[BatchTensor]) -> Program | None:
        """Compile the record to a function that returns what the rule returned; None if that is not possible.

        out: the result of the rule. batches: those among the arguments, of which `out` may be one.
        """
        if not self._sound:
            return None
        expression = self._result(out, batches)
        if expression is None:
            return None
        body, kept = f"    return {expression}\n", []
        for line, call in zip(reversed(self._lines), reversed(self._calls), strict=True):
            name = line.partition(" ")[0]
            if name not in self._without_values or re.search(rf"\b{name}\b", body):
                body = f"    {line}\n{body}"
                kept.append((name, call))
        source = f"def program(i, b):\n{body}"
        exec(compile(source, "<duoka replay>", "exec"), self._constants)
        program: Any = self._constants["program"]
        program.direct = self._direct(*kept[0], out, batches) if len(kept) == 1 else None
        return program  # type: ignore[no-any-return]

    def _direct(self, name: str, call: tuple[Any, Any, Any], out: Any, batches: list[BatchTensor]) -> Any:
        """Describe a program that is a single call, for the engine in C; return None if it is no simple one.

        Returns:
            The function; for each argument its place among the inputs (-1: none), and its value if it is constant;
            the names of the last arguments; the Metas of the batches that are made of what the function returns, a
            sequence of this type (None: one tensor). In place of the Metas: the index of the batch that is returned.
        """
        func, args, kwargs = call
        words = [self._word(value) or "" for value in (*args, *kwargs.values())]
        places = [int(word[2:-1]) if re.fullmatch(r"i\[\d+\]", word) else -1 for word in words]
        constants = ["None" if place >= 0 else word for place, word in zip(places, words, strict=True)]
        if any(re.search(r"\b([io]\[|o\d)", word) for word in constants):
            return None
        values = [eval(word, self._constants) for word in constants]
        results: Any = next((place for place, batch in enumerate(batches) if out is batch), None)
        kind = type(out) if type(out) in (tuple, list) else None
        if results is None:
            made = [out] if kind is None else out
            names = [name] if kind is None else [f"{name}[{place}]" for place in range(len(made))]
            if [type(one) is BatchTensor and self._known.get(id(one._rows)) for one in made] != names:
                return None
            results = tuple(one._meta for one in made)
        return func, tuple(places), tuple(values), tuple(kwargs), results, kind

    def _result(self, out: Any, batches: list[BatchTensor]) -> str | None:
        """Return the expression for the result; None if it contains an unknown tensor."""
        for place, batch in enumerate(batches):
            if out is batch:
                return f"b[{place}]"
        if type(out) is BatchTensor:
            rows = self._known.get(id(out._rows))
            return rows and f"{self._constant(BatchTensor.remake)}({rows}, {self._constant(out._meta)})"
        if type(out) is Tensor:
            return self._known.get(id(out))
        if out is None:
            return "None"
        if not isinstance(out, (tuple, list)) or isinstance(out, torch.Size):
            return None
        parts = [self._result(one, batches) for one in out]
        if None in parts:
            return None
        kind, given = self._constant(type(out)), ", ".join(parts)  # type: ignore[arg-type]
        return f"{kind}({given})" if hasattr(out, "_fields") else f"{kind}([{given}])"


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
