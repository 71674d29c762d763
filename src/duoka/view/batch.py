"""The batch tensor: stands for a whole global batch while this rank holds its own rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from duoka.errors import Refused
from duoka.view.collectives import Gathered
from duoka.view.cut import Cut
from duoka.view.site import user_line
from duoka.view.view import View

LENT = 7  # gathered copies that a batch remembers beside the newest

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """Where the batch sits: dimension `dim` has `outer * n * inner` entries, the samples in the middle.

    `[B, T, C].view(-1, C)` has inner = T, `[T, B, C].view(-1, C)` has outer = T.
    """

    view: View
    cut: Cut
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """Entries of the batch dimension, of all ranks together."""
        return self.outer * self.cut.n * self.inner

    @property
    def local_size(self) -> int:
        """Entries of the batch dimension that this rank holds."""
        return self.outer * self.cut.rows * self.inner

    def at(self, dim: int) -> Spec:
        """The same rows in another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def own(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """This rank's rows of a replicated tensor, along `dim` (default: `self.dim`), as a view."""
        dim = self.dim if dim is None else dim
        whole = self.view.enter(whole)
        if self.outer == 1:
            return whole.narrow(dim, self.cut.start * self.inner, self.cut.rows * self.inner)
        apart = whole.unflatten(dim, (self.outer, self.cut.n, self.inner))
        own: Tensor = apart.narrow(dim + 1, self.cut.start, self.cut.rows).flatten(dim, dim + 2)
        return own

    def gather(self, local: Tensor) -> Tensor:
        """Every rank's rows put together: the replicated tensor that one device would have."""
        apart = local.unflatten(self.dim, (self.outer, self.cut.rows, self.inner)).movedim(self.dim + 1, 0)
        whole: Tensor = Gathered.apply(apart, self.cut, self.view.ranks)
        return whole.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


class BatchTensor(Tensor):
    """Has the global shape and no storage; `to_local()` is this rank's rows, `full_tensor()` all rows.

    Every torch function looks itself up in `rules`; what has no rule is gathered and computed whole.
    """

    _local: Tensor
    _spec: Spec
    _lent: tuple[tuple[Tensor, int], ...] = ()  # gathered copies of which views were handed out, and their versions
    rules: ClassVar[Mapping[Callable[..., Any], Rule]] = {}

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec) -> BatchTensor:
        """`local`: this rank's rows, tracked by autograd; the size of its batch dimension must be the share."""
        shape = list(local.shape)
        if shape[spec.dim] != spec.local_size:
            raise AssertionError(
                f"a tensor of shape {tuple(shape)} does not hold {spec.local_size} rows in dimension {spec.dim}"
            )
        shape[spec.dim] = spec.size
        batch: BatchTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        batch._local, batch._spec = local, spec
        return batch

    def to_local(self) -> Tensor:
        """This rank's rows, as a plain tensor that shares memory and gradient with the batch."""
        return self._local

    def full_tensor(self) -> Tensor:
        """All rows, gathered: a collective, called by every rank."""
        return self._spec.gather(self._local)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: kwargs[name] for name in kwargs if name != "input"}
        for value in (*args, *kwargs.values()):
            if isinstance(value, BatchTensor) and value._lent:
                _check_lent(value, args[2] if func is Tensor.__setitem__ and len(args) > 2 else None)
        rule = cls.rules.get(func)
        if rule is not None:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return compute_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Refused(f"{func} came to a batch past duoka's rules ({user_line()}), so it cannot be shared out")


def gather_all(tree: Any) -> Any:
    """`tree` with every batch tensor in it gathered."""
    return tree_map_only(BatchTensor, BatchTensor.full_tensor, tree)


def batches_in(tree: Any) -> list[BatchTensor]:
    """The batch tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, BatchTensor)]


def compute_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and compute as one device would: always right, at worst not faster.

    What the operation writes into a batch is written back into each rank's own rows.
    """
    name = getattr(func, "__name__", str(func))
    batches_in((args, kwargs))[0]._spec.view.gathered[name, user_line()] += 1
    if isinstance(kwargs.get("out"), BatchTensor) or name in ("__set__", "__delete__"):
        raise Refused(f"{name} into a batch cannot be shared out ({user_line()}); write it without `out=`")
    if not (args and isinstance(args[0], BatchTensor)):
        return func(*gather_all(args), **gather_all(kwargs))
    batch = args[0]
    if not _writes(name, kwargs):
        whole = batch.full_tensor()
        out = func(whole, *gather_all(args[1:]), **gather_all(kwargs))
        _lend(batch, whole, out)
        return out
    whole = batch.full_tensor().clone()
    func(whole, *gather_all(args[1:]), **gather_all(kwargs))
    if whole.shape != batch.shape:
        raise Refused(f"{name} at {user_line()} would change a batch's shape in place; write `x = x.{name[:-1]}()`")
    batch._local.copy_(batch._spec.own(whole))
    return None if name == "__setitem__" else batch


def _lend(batch: BatchTensor, whole: Tensor, out: Any) -> None:
    """Remember a gathered copy of which views go out: on one device, writing into them would write into the batch."""
    if any(isinstance(leaf, Tensor) and _share_memory(leaf, whole) for leaf in tree_leaves(out)):
        batch._lent = (*batch._lent[-LENT:], (whole, whole._version))


def _check_lent(batch: BatchTensor, put_back: Any) -> None:
    """Refuse to go on where a gathered copy was written into: the batch does not have what was written.

    put_back: what is just being written into the batch itself (`x[1:3] += 1` takes, adds and puts back).
    """
    for whole, version in batch._lent:
        if whole._version == version:
            continue
        if isinstance(put_back, Tensor) and not isinstance(put_back, BatchTensor) and _share_memory(put_back, whole):
            batch._lent = tuple(entry for entry in batch._lent if entry[0] is not whole)
            continue
        raise Refused(
            f"rows taken from a batch were written into before {user_line()}; write through the batch itself "
            "instead: `x[i] = value`, not `x[i].fill_(value)`"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    dunder = name.startswith("__")
    return (
        name == "__setitem__"
        or name in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not dunder)
        or bool(kwargs.get("inplace"))
    )


_OPERATORS = "add sub mul truediv div floordiv mod pow and or xor lshift rshift matmul"
_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS.split())
