"""Every function that torch has for tensors is accounted for: a new torch with a new one fails here."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from duoka.errors import Refused
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from duoka.view.whole import REFUSED
from tests.view.ranks import on_ranks, shared, whole_of
from tests.view.rules.lists import GATHERS, GONE, HARMLESS, INNER, NOT_IN_ALL, TRANSFORMS


def _indices(x: Tensor) -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 1, 2]])


def _rows(x: Tensor) -> Tensor:
    return x[:, 0]


# What torch says may not be overridden, and a script can call with a batch x of 6 x 4.
ASKED: dict[str, Callable[[Tensor], Any]] = {
    "__delitem__": lambda x: x.__delitem__(0),
    "__dir__": lambda x: len(dir(x)) > 100,
    "__iter__": lambda x: list(x),
    "_conj": lambda x: torch._conj(torch.complex(x, x)).imag,
    "_conj_physical": lambda x: torch._conj_physical(x),
    "_is_all_true": lambda x: torch._is_all_true(x > 0),
    "_is_any_true": lambda x: torch._is_any_true(x > 0),
    "_is_zerotensor": lambda x: x._is_zerotensor(),
    "_lazy_clone": lambda x: x._lazy_clone(),
    "_neg_view": lambda x: torch._neg_view(x),
    "_reduce_ex_internal": lambda x: copy.copy(x),
    "_to_sparse": lambda x: x._to_sparse().to_dense(),
    "_to_sparse_bsc": lambda x: x._to_sparse_bsc((2, 2)).to_dense(),
    "_to_sparse_bsr": lambda x: x._to_sparse_bsr((2, 2)).to_dense(),
    "_to_sparse_csc": lambda x: x._to_sparse_csc().to_dense(),
    "_to_sparse_csr": lambda x: x._to_sparse_csr().to_dense(),
    "_typed_storage": lambda x: x._typed_storage().tolist(),
    "align_tensors": lambda x: torch.align_tensors(x.refine_names("a", "b"))[0].rename(None),
    "arange": lambda x: torch.arange(x.abs().max()),
    "as_tensor": lambda x: torch.as_tensor(x),
    "asarray": lambda x: torch.asarray(x),
    "constant": lambda x: nn.init.constant_(x * 1, 2.0),
    "dirac": lambda x: nn.init.dirac_(x[:, :, None] * 1),
    "export": lambda x: torch.export.export(nn.Linear(4, 2), (x,)).module()(x).shape,
    "from_numpy": lambda x: torch.from_numpy(x.numpy()),
    "full": lambda x: torch.full((2,), x.sum()),
    "kaiming_normal": lambda x: nn.init.kaiming_normal_(x * 0, 0).shape,
    "kaiming_uniform": lambda x: nn.init.kaiming_uniform_(x * 0).shape,
    "linspace": lambda x: torch.linspace(x[0, 0], x[1, 1], 3),
    "logspace": lambda x: torch.logspace(x[0, 0], x[1, 1], 3),
    "nested_to_padded_tensor": lambda x: torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(x)), 0.0),
    "normal": lambda x: nn.init.normal_(x * 1).shape,
    "orthogonal": lambda x: nn.init.orthogonal_(x * 1).shape,
    "range": lambda x: torch.range(0, x.abs().max()),
    "result_type": lambda x: torch.result_type(x, 1) == torch.float64,
    "save": lambda x: torch.save(x, io.BytesIO()),
    "scalar_tensor": lambda x: torch.scalar_tensor(x.sum()),
    "sparse": lambda x: nn.init.sparse_(x * 1, 0.0).shape,
    "sparse_bsc_tensor": lambda x: x.to_sparse_bsc((2, 2)).to_dense(),
    "sparse_bsr_tensor": lambda x: x.to_sparse_bsr((2, 2)).to_dense(),
    "sparse_compressed_tensor": lambda x: torch.sparse_csr_tensor([0, 6], range(6), _rows(x), (1, 6)).to_dense(),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor(_indices(x), _rows(x), (6, 4)).to_dense(),
    "sparse_csc_tensor": lambda x: torch.sparse_csc_tensor([0, 6], range(6), _rows(x), (6, 1)).to_dense(),
    "sparse_csr_tensor": lambda x: torch.sparse_csr_tensor([0, 6], range(6), _rows(x), (1, 6)).to_dense(),
    "tensor": lambda x: torch.tensor(x),
    "to_padded_tensor": lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0),
    "to_sparse_bsc": lambda x: x.to_sparse_bsc((2, 2)).to_dense(),
    "to_sparse_bsr": lambda x: x.to_sparse_bsr((2, 2)).to_dense(),
    "to_sparse_coo": lambda x: x.to_sparse_coo().to_dense(),
    "to_sparse_csc": lambda x: x.to_sparse_csc().to_dense(),
    "to_sparse_csr": lambda x: x.to_sparse_csr().to_dense(),
    "uniform": lambda x: nn.init.uniform_(x * 1, 2, 2),
    "upsample": lambda x: F.upsample(x[:, None], scale_factor=2),
    "upsample_bilinear": lambda x: F.upsample_bilinear(x[:, None, None], scale_factor=2),
    "upsample_nearest": lambda x: F.upsample_nearest(x[:, None], scale_factor=2),
    "vander": lambda x: torch.vander(_rows(x)),
    "xavier_normal": lambda x: nn.init.xavier_normal_(x * 1).shape,
    "xavier_uniform": lambda x: nn.init.xavier_uniform_(x * 1).shape,
}


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or type(func).__name__


def test_every_function_that_can_be_overridden_has_a_rule_or_gathers_or_is_refused() -> None:
    functions = {func for functions in torch.overrides.get_overridable_functions().values() for func in functions}
    names = {torch.overrides.resolve_name(func) or _name(func): func for func in functions}
    gathers = {f"{space}.{name}" for space, listed in GATHERS.items() for name in listed.split()}
    without = {name.removesuffix(".__get__") for name, func in names.items() if func not in BatchTensor.rules}
    refused = {name for name in without if name.rpartition(".")[2] in REFUSED}
    assert_known(without - refused, gathers)


def test_every_function_that_cannot_be_overridden_is_known() -> None:
    functions = [func for func in torch.overrides.get_ignored_functions() if func not in BatchTensor.rules]
    lists = [set(names.split()) for names in (HARMLESS, INNER, GONE, TRANSFORMS)] + [set(ASKED)]
    assert sum(map(len, lists)) == len(set().union(*lists)), "in two lists"
    assert_known({_name(func) for func in functions}, set().union(*lists))


def assert_known(found: set[str], listed: set[str]) -> None:
    """This torch has what is listed, and nothing else; but what some versions have not may be missing."""
    assert not found - listed
    missing = listed - found
    assert not {name for name in missing if not {name, name.rpartition(".")[0]} & set(NOT_IN_ALL.split())}


FOREACH: dict[str, Callable[[list[Tensor]], Any]] = {
    "add": lambda given: torch._foreach_add(given, 1.0),
    "mul": lambda given: torch._foreach_mul(given, given),
    "norm": lambda given: torch._foreach_norm(given),
    "mul_": lambda given: torch._foreach_mul_(given, given),
    "copy_": lambda given: torch._foreach_copy_(given, [torch.ones(6, 4)] * 2),
    "copy_ into plain": lambda given: (
        torch._foreach_copy_(plain := [torch.ones(6, 4), torch.ones(6, 4)], given) or plain
    ),
}


@pytest.mark.parametrize("name", FOREACH)
def test_lists_of_batches(name: str) -> None:
    """torch.foreach, of which torch before 2.15 has the same functions under private names."""
    whole = torch.arange(24.0).view(6, 4)

    def of(x: Tensor) -> Any:
        given = [x + 1, x * 2]
        return FOREACH[name](given), given

    expected = tree_leaves(of(whole))
    for found in on_ranks(2, lambda view: [whole_of(leaf) for leaf in tree_leaves(of(shared(view, whole)))]):
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ASKED)
def test_what_cannot_be_overridden_is_right_or_refused(name: str) -> None:
    ask = ASKED[name]
    whole = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 7 - 1
    raised, expected = False, None
    try:
        expected = tree_leaves(ask(whole.clone()))
    except Exception:
        raised = True

    def on_rank(view: View) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [whole_of(leaf) for leaf in tree_leaves(ask(shared(view, whole)))]
        except Refused:
            return "refused"
        except Exception as error:
            return error

    for found in on_ranks(2, on_rank):
        if isinstance(found, Exception):
            assert raised or "duoka" in str(found), found
        elif found != "refused":
            assert not raised
            assert len(found) == len(expected or [])
            for one, other in zip(expected or [], found, strict=True):
                torch.testing.assert_close(other, one) if isinstance(one, Tensor) else pytest.approx(other) == one
