"""What a run of a module does with its rows, seen below autograd.

Every operator passes here. A tensor *comes of rows* if it was computed from any that does. Reading one into Python,
or writing it where it outlives the run, makes a rank's own rows decide what on one device the whole batch decides.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from duoka.private.torch import TorchDispatchMode
from duoka.view.batch import BatchTensor
from duoka.view.draws import is_drawing
from duoka.view.site import calling_line, user_line

# What they give depends on a tensor's shape alone.
_BY_SHAPE = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
_MAKING = ("lift_fresh", "lift_fresh_copy")  # what `torch.tensor` gives, or numpy holds
_PACKING = ("_pack_padded_sequence",)
_SCALAR = "_local_scalar_dense"  # a number for C++: `torch.arange(lengths.max())`
_CHECKING = frozenset(
    {"multinomial", "bernoulli", "binomial", "poisson", "normal"}
)  # read only to see what is allowed
_COUNTING = ("bincount", "_unique", "_unique2", "unique_dim", "unique_consecutive")  # as long as the batch says
_READERS = """
item tolist numpy equal allclose is_nonzero data_ptr __bool__ __int__ __float__ __complex__ __index__ __array__
__dlpack__ __repr__ __format__ __contains__
"""
_READING = frozenset(_READERS.split())
_SHORT = (torch.float16, torch.bfloat16)
_LEAF = "torch::autograd::AccumulateGrad"
_set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class Mixed(Exception):
    """Rows are not independent of each other, or it cannot be told that they are. Its text says why."""


class Raised(Mixed):
    """The module raised an exception of its own."""


class Storages:
    """A set of tensors' memory. What is freed is not taken for what comes to lie there later."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self._held:
            strided = tensor.layout is torch.strided
            self._held[key] = StorageWeakRef(tensor.untyped_storage()) if strided else tensor

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and not isinstance(tensor, BatchTensor) and _key(tensor) in self._held

    def alive(self) -> set[int]:
        """The keys of those that somebody still holds."""
        return {key for key, held in self._held.items() if isinstance(held, StorageWeakRef) and not held.expired()}


class Witness(TorchDispatchMode):
    """A context that sees one run.

    draw: is handed every operator that draws. rows: what comes of rows. reads: the script's lines that read into
    Python what does not. short: whether anything was computed in 16 bits. checking: values are read only to see
    whether they are allowed. Raises Mixed out of the operator that
    mixes; `reason` tells it also where the module has caught that.
    """

    def __init__(self, draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.rows, self.reads, self.reason = Storages(), set[str](), ""
        self.short = self.checking = False
        self._draw, self._made = draw, Storages()
        self._packed, self._entries = Storages(), set[int]()  # what comes of packed sequences, and how long these are
        self._before: list[tuple[Tensor, Tensor]] = []  # what was written, and the values it had
        self._data: list[tuple[Tensor, Tensor]] = []  # the same for `tensor.data = other`
        self._given: set[Tensor] = set()
        self._functions = _Functions(self)
        with torch.inference_mode(False), torch.enable_grad():
            self._start = _node(torch.zeros((), requires_grad=True).clone())._sequence_nr()

    def __enter__(self) -> Witness:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def given(self, tensor: Tensor, of_rows: bool, requires_grad: bool) -> Tensor:
        """A copy to run with, cut off from what it was computed from."""
        leaf = tensor.detach().clone()
        if requires_grad:
            leaf.requires_grad_()
            self._given.add(leaf)
        copy = leaf.clone() if requires_grad else leaf  # a leaf could not be written into
        for made in (leaf, copy):
            self._made.add(made)
            if of_rows:
                self.rows.add(made)
        return copy

    def mixes(self, reason: str) -> NoReturn:
        """Rows are not independent of each other here."""
        self.reason = self.reason or f"it {reason} at {user_line()}"
        raise Mixed(self.reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in _flat((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
        keys = {_key(tensor) for tensor in tensors}
        of_rows = name not in _BY_SHAPE and any(tensor in self.rows for tensor in tensors)
        if of_rows and name == "embedding" and True in args[3:4]:
            self.mixes("weighs gradients by how often an index occurs in the batch")
        if of_rows and (name in _COUNTING or (name == _SCALAR and not self.checking and calling_line() is not None)):
            self.mixes("makes something as large as values of the batch say")
        if name == "index" and args[1][0] is None and any(index in self.rows for index in args[1][1:]):
            self.mixes("chooses columns by values of the batch")
        for tensor in _written(func, args, kwargs):
            self._write(tensor, of_rows)
        of_packed = name in _PACKING or any(tensor in self._packed for tensor in tensors)
        draws = is_drawing(func, args, kwargs)
        if draws and of_packed and any(map(self._is_packed, tensors)):
            self.mixes("draws random numbers for packed sequences, whose place depends on all lengths of the batch")
        out = self._draw(func, args, kwargs) if draws else func(*args, **kwargs)
        if name in _PACKING:
            self._entries.add(out[0].shape[0])
        for leaf in _flat((out,)):
            if not isinstance(leaf, Tensor):
                continue  # read by torch itself (`one_hot` looks for the largest), or by a function seen above
            self.short = self.short or leaf.dtype in _SHORT
            if name in _MAKING or _key(leaf) not in keys:
                self._made.add(leaf)
            if of_rows:
                self.rows.add(leaf)
            if of_packed:
                self._packed.add(leaf)
        return out

    def _is_packed(self, tensor: Tensor) -> bool:
        """Whether it has the entries of packed sequences; where all are as long, they are computed as (T, N, ...)."""
        return not self._entries.isdisjoint(tensor.shape[:1]) or prod(tensor.shape[:2]) in self._entries

    def read(self, of_rows: bool) -> None:
        """Something is read into Python: harmless in torch's and other libraries' own code."""
        line = calling_line()
        if line is not None and of_rows:
            self.mixes("reads a value of the batch")
        if line is not None:
            self.reads.add(line)

    def _write(self, tensor: Tensor, of_rows: bool) -> None:
        if tensor not in self._made:
            if of_rows:
                self.mixes("keeps something of the batch")
            self._before.append((tensor, tensor.detach().clone()))
        elif of_rows:
            self.rows.add(tensor)

    def data_set(self, tensor: Tensor, other: Any) -> None:
        """`tensor.data = other`."""
        if tensor in self._made:
            return
        if isinstance(other, Tensor) and other in self.rows:
            self.mixes("keeps something of the batch")
        self._data.append((tensor, tensor.data))

    def put_back(self) -> list[Tensor]:
        """Undo what was written to what was there before the run. What had been written there, in order."""
        tensors = {id(tensor): tensor for tensor, _ in (*self._before, *self._data)}
        found = [tensor.detach().clone() for tensor in tensors.values()]
        for tensor, before in reversed(self._data):
            tensor.data = before
        for tensor, before in reversed(self._before):
            tensor.data.copy_(before)
        self._before, self._data = [], []
        return found

    def foreign(self, outputs: list[Any], module: nn.Module) -> bool:
        """Whether what came out has to do with leaves that need gradients and are not the module's parameters.

        Raises Mixed if it has to do with what was computed before from such: its gradient cannot be watched.
        """
        own = {id(parameter) for parameter in module.parameters()} | {id(leaf) for leaf in self._given}
        found = False
        for node in graph(outputs):
            if node.name() == _LEAF:
                beside = id(node.variable) not in own and node.variable not in self._made  # a leaf of its own making
                found = found or beside
            elif node._sequence_nr() < self._start:
                self.mixes(f"uses a tensor that was computed before ({node.name()})")
        return found

    def forget_rows(self) -> bool:
        """Whether anybody still holds something of rows after the run; it is taken out of lists that do."""
        self._given.clear()
        if not self.rows.alive():
            return False
        gc.collect()
        kept = self.rows.alive()

        def is_kept(entry: Any) -> bool:
            return type(entry) is Tensor and _key(entry) in kept

        if kept:
            for holder in [found for found in gc.get_objects() if type(found) is list and any(map(is_kept, found))]:
                holder[:] = [entry for entry in holder if not is_kept(entry)]
        return bool(kept)


class _Functions(TorchFunctionMode):
    """Sees the functions that read a tensor without an operator."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self._witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            name = getattr(func, "__name__", "")
            if name in _READING:
                self._witness.read(args[0] in self._witness.rows)
            elif name == "register_hook" and not args[0].is_leaf:
                self._witness.mixes("registers a hook on a tensor inside of it")
            elif func == _set_data:
                self._witness.data_set(*args)
            elif name in _CHECKING or (name == "one_hot" and {*args[1:], *(kwargs or {}).values()} - {-1}):
                return self._checked(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _checked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, of a function that looks at values without telling them."""
        before, self._witness.checking = self._witness.checking, True
        try:
            return func(*args, **kwargs)
        finally:
            self._witness.checking = before


def graph(outputs: list[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of the autograd graph that led to these tensors, each once, in one order on all ranks.

    ends: nodes that are left out, with what is behind them.
    """
    stop = set(ends)
    nodes = [_node(leaf) for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    pending = [node for node in nodes if node not in stop]
    pending.reverse()
    seen = {*pending, *stop}
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def _node(tensor: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _key(tensor: Tensor) -> int:
    """Tells memory that is alive from other memory."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from (leaf for leaf in _flat((value,)) if isinstance(leaf, Tensor))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """What operators take and give, out of its lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
