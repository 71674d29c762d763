"""torch's own samples of all its operations: right, or refused; and every rule is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from duoka.errors import Refused
from duoka.view.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import in_turns, shared, whole_of
from tests.view.rules.operations import cases, difference
from tests.view.rules.test_against_torch import REDUCED, SHARED, WHOLE, _inputs
from tests.view.rules.test_layers import LAYERS, layer_inputs

Use = Callable[[Any, Tensor], Any]

# How to ask functions of these names (as methods, in torch, torch.special and F) of a batch of 5 x 4 numbers in 0..1.
USES: list[tuple[str, Use]] = [
    (
        "abs absolute arccos arccosh arcsin arcsinh arctan arctanh negative fix imag relu selu celu hardshrink conj "
        "digamma erf erfc erfinv exp2 expit expm1 gammaln i0 log1p logit psi round sinc detach cpu "
        "adjoint "
        "numel nelement ndimension element_size is_complex is_floating_point is_conj is_neg "
        "is_signed "
        "is_inference get_device "
        "is_contiguous is_shared is_pinned _is_view nansum nanmean aminmax_ poisson bernoulli "
        "__neg__ __pos__ __abs__ __len__ t dropout",
        lambda f, x: f(x),
    ),
    (
        "amin aminmax_ argmin argmax argsort median nanmedian nansum nanmean prod std var std_mean var_mean cummax "
        "cummin cumprod cumsum logcumsumexp softmax log_softmax softmin diff flip unbind amax sort all any",
        lambda f, x: f(x, dim=1) if f.__name__ != "flip" else f(x, [1]),
    ),
    ("aminmax", lambda f, x: f(x, dim=1)),
    (
        "arctan2 divide greater greater_equal less less_equal multiply not_equal subtract gammainc gammaincc xlogy "
        "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ "
        "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ is_same_size "
        "view_as reshape_as expand_as type_as __matmul__T",
        lambda f, x: f(x, x * 0.5 + 0.1),
    ),
    ("__and__ __rand__ __or__ __ror__ __xor__ __rxor__", lambda f, x: f(x > 0.5, x > 0.2)),
    ("__lshift__ __rlshift__ __rshift__ __rrshift__", lambda f, x: f((x * 5).long(), 1)),
    ("__iand__ __ior__ __ixor__", lambda f, x: f(x > 0.5, x > 0.2)),
    ("__ilshift__ __irshift__", lambda f, x: f((x * 5).long(), 1)),
    ("moveaxis swapaxes swapdims transpose movedim", lambda f, x: f(x, 0, 1)),
    ("permute", lambda f, x: f(x, (1, 0))),
    ("clip", lambda f, x: f(x, 0.2, 0.8)),
    ("threshold", lambda f, x: f(x, 0.2, 0.8)),
    ("multigammaln", lambda f, x: f(x + 3, 2)),
    ("multinomial", lambda f, x: f(x, 2)),
    ("binomial", lambda f, x: f((x * 5).round(), x)),
    ("quantile kthvalue", lambda f, x: f(x, 0.5 if f.__name__ == "quantile" else 2, dim=1)),
    ("roll", lambda f, x: f(x, 1, 1)),
    ("repeat_interleave", lambda f, x: f(x, 2, 1)),
    ("chunk tensor_split", lambda f, x: f(x, 2, 1)),
    ("split_with_sizes", lambda f, x: f(x, [1, 3], 1)),
    ("tile", lambda f, x: f(x, (1, 2))),
    ("tril triu tril_ triu_", lambda f, x: f(x[:, None] * x[..., None])),
    ("gather take_along_dim", lambda f, x: f(x, *((1, x.long()) if f.__name__ == "gather" else (x.long(), 1)))),
    ("index_select", lambda f, x: f(x, 1, torch.tensor([2, 0]))),
    ("index_add index_copy index_reduce index_add_ index_copy_ index_reduce_", lambda f, x: _at(f, x)),
    ("index_fill index_fill_", lambda f, x: f(x * 1, 1, torch.tensor([2, 0]), 0.5)),
    ("index_put index_put_", lambda f, x: f(x * 1, (torch.arange(5)[:, None], torch.tensor([2, 0])), x[:, :2])),
    ("select_scatter", lambda f, x: f(x, x[:, 1], 1, 2)),
    ("slice_scatter", lambda f, x: f(x, x[:, :2], 1, 1, 3)),
    ("scatter scatter_add", lambda f, x: f(x * 1, 1, x.long(), x * 2)),
    ("scatter_add_", lambda f, x: f(x * 1, 1, x.long(), x * 2)),
    ("scatter_reduce scatter_reduce_", lambda f, x: f(x * 1, 1, x.long(), x * 2, "amax")),
    ("norm", lambda f, x: f(x, 2, 1)),
    ("prelu", lambda f, x: f(x - 0.5, torch.tensor([0.2], dtype=x.dtype))),
    ("mv", lambda f, x: f(x, torch.arange(4.0, dtype=x.dtype))),
    ("ger", lambda f, x: f(x[:, 0], x[:, 1])),
    ("concat concatenate", lambda f, x: f([x, x], 1)),
    ("rrelu alpha_dropout feature_dropout feature_alpha_dropout", lambda f, x: f(x - 0.5, *_how_to_drop(f))),
    ("dropout1d", lambda f, x: f(x[..., None])),
    ("gumbel_softmax", lambda f, x: f(x, dim=1)),
    ("random_", lambda f, x: f(x * 1, 5)),
    ("bernoulli_", lambda f, x: f(x * 1, 0.5)),
    ("__matmul__ __rmatmul__", lambda f, x: f(x, x.t()) if f.__name__ == "__matmul__" else f(x.t(), x)),
    ("imag", lambda f, x: f(torch.complex(x, x * 2))),
    ("dropout", lambda f, x: f(x, 0.5, True)),
    ("copy_", lambda f, x: f(x * 1, x + 1)),
    ("detach_ relu_", lambda f, x: f(x * 1)),
    ("type", lambda f, x: f(x, torch.float32)),
    ("pairwise_distance", lambda f, x: f(x, x * 2)),
    ("rms_norm", lambda f, x: f(x, (4,))),
    ("group_norm", lambda f, x: f(x, 2)),
    ("max_pool1d avg_pool1d max_pool1d_with_indices", lambda f, x: f(x[:, None], 2)),
    ("lp_pool1d", lambda f, x: f(x[:, None], 2.0, 2)),
    ("adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool1d_with_indices", lambda f, x: f(x[:, None], 2)),
    ("max_pool2d avg_pool2d max_pool2d_with_indices", lambda f, x: f(_images(x), 2)),
    ("adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices", lambda f, x: f(_images(x), 2)),
    ("lp_pool2d", lambda f, x: f(_images(x), 2.0, 2)),
    ("max_pool3d avg_pool3d max_pool3d_with_indices", lambda f, x: f(_images(x)[:, :, None], (1, 2, 2))),
    (
        "adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices",
        lambda f, x: f(_images(x)[:, :, None], 1),
    ),
    ("lp_pool3d", lambda f, x: f(_images(x)[:, :, None], 2.0, (1, 2, 2))),
    ("conv2d conv_transpose2d", lambda f, x: f(_images(x), torch.ones(4, 4, 2, 2, dtype=x.dtype))),
    ("conv3d conv_transpose3d", lambda f, x: f(_images(x)[:, :, None], torch.ones(4, 4, 1, 2, 2, dtype=x.dtype))),
    ("conv1d conv_transpose1d", lambda f, x: f(x[:, None], torch.ones(1, 1, 2, dtype=x.dtype))),
    ("channel_shuffle pixel_shuffle", lambda f, x: f(_images(x), 2)),
    ("unfold", lambda f, x: f(_images(x), (2, 2))),
    ("fold", lambda f, x: f(x[..., None], (2, 2), (2, 2))),
    ("max_unpool1d", lambda f, x: f(x[:, None], 2 * torch.arange(4).expand(5, 1, 4), 2)),
    ("max_unpool2d", lambda f, x: f(x[:, None, :, None], 4 * torch.arange(4).view(4, 1).expand(5, 1, 4, 1), 2)),
    (
        "max_unpool3d",
        lambda f, x: f(x[:, None, :, None, None], 8 * torch.arange(4).view(4, 1, 1).expand(5, 1, 4, 1, 1), 2),
    ),
    ("requires_grad_ retain_grad", lambda f, x: f((x * 1).requires_grad_())),
    ("register_hook", lambda f, x: bool(f((x * 1).requires_grad_(), print))),
    ("backward", lambda f, x: _backward(f, x * 1)),
    ("__deepcopy__", lambda f, x: f(x, {})),
    ("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__", lambda f, x: f(x * 1, 2)),
    ("bool byte char short int long half float double bfloat16 cfloat cdouble chalf", lambda f, x: f(x)),
]
# Those that say something of a rank's memory, which is not one device's.
OWN = "data_ptr const_data_ptr storage_offset record_stream cuda pin_memory"


def _how_to_drop(f: Any) -> tuple[Any, ...]:
    return (0.5, True) if f.__name__ != "rrelu" else (0.1, 0.3, True)


def _at(f: Any, x: Tensor) -> Any:
    how = ("prod",) if "reduce" in f.__name__ else ()
    return f(x * 1, 1, torch.tensor([2, 0]), x[:, :2], *how)


def _images(x: Tensor) -> Tensor:
    return x[:, :, None, None] * torch.arange(1.0, 17.0, dtype=x.dtype).view(4, 4)


def _backward(f: Any, x: Tensor) -> Any:
    x.requires_grad_()
    f(x * 3, torch.ones(x.shape, dtype=x.dtype))
    return x.grad


@pytest.fixture(scope="module")
def operations() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """The functions of which the rule was asked, and fitted."""
    found: set[Any] = set()

    def noting(rule: Any) -> Any:
        def noted(func: Any, args: Any, kwargs: Any) -> Any:
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                found.add(func)
            return out

        return noted

    for device in ("cuda", "xpu"):  # to seed one that is not there costs a traceback each time
        monkeypatch.setattr(f"torch.{device}.random._lazy_call", lambda *args, **kwargs: None)
    monkeypatch.setattr(BatchTensor, "rules", {func: noting(rule) for func, rule in BatchTensor.rules.items()})
    return found


def _wrong(
    operations: list[Any], samples: int, dims: tuple[int, ...], gradients: bool, world_size: int = 2
) -> list[str]:
    """What is wrong with operations, where plain torch can do them."""
    known = []
    for operation in operations:
        for case in cases(operation, samples, dims):
            if case.rows < world_size:
                continue  # a batch of fewer rows than ranks stays whole
            with suppress(Exception):
                known.append((case, case.run(None, gradients)))

    def on_rank(view: View) -> list[str]:
        texts = []
        for case, expected in known:
            try:
                text = difference(expected, case.run(view, gradients), case.name)
            except Refused:
                continue
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            texts += [f"{case}: {text}"] if text else []
        return texts

    return [text for texts in in_turns(world_size, on_rank) for text in texts] if known else []


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_every_operation_and_every_rule(operations: list[Any], used: set[Any]) -> None:
    assert not _wrong(operations, 1, (0,), gradients=False)

    def rest(view: View) -> list[str]:
        for call in (*SHARED.values(), *REDUCED.values(), *WHOLE.values()):
            given = _inputs(5, 0)
            call(**{**given, **{name: shared(view, given[name]) for name in ("x", "y", "c")}})
        for _, layer in LAYERS.values():
            layer({name: value if name == "w" else shared(view, value) for name, value in layer_inputs(5).items()})
        return [text for func in list(BatchTensor.rules) for text in _ways_wrong(view, func, used)]

    assert not [text for texts in in_turns(2, rest) for text in texts]
    asked = {func for functions in torch.overrides.get_overridable_functions().values() for func in functions}
    never = {torch.overrides.resolve_name(func) for func in asked if func in BatchTensor.rules and func not in used}
    assert not sorted(name for name in never if name is None or name.rpartition(".")[2] not in OWN.split())


def _ways_wrong(view: View, func: Any, used: set[Any]) -> list[str]:
    """What a function says of a batch that it does not say of a plain tensor."""
    name = getattr(func, "__name__", "").removeprefix("special_")
    uses = [use for names, use in USES if name in names.split() or name.removesuffix("_") in names.split()]
    if name == "__get__":
        uses = [lambda f, x: f(torch.complex(x, x)) if func.__self__.__name__ not in ("T", "mT", "H", "mH") else f(x)]
    texts = []
    whole = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for use in uses:
        torch.manual_seed(2)
        try:
            expected = use(func, whole * 1)
        except Exception:
            continue  # not for functions of this name in this place
        torch.manual_seed(2)
        used.add(func)  # torch asks some rules by another name
        text = difference(_leaves(expected), _leaves(use(func, shared(view, whole))), name)
        texts += [f"{torch.overrides.resolve_name(func)}: {text}"] if text else []
    return texts


def _leaves(out: Any) -> dict[str, list[Any]]:
    return {"result": [whole_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, (Tensor, int, float))]}


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_every_operation(operations: list[Any], world_size: int) -> None:
    # A gradient is world_size times as large on its way: torch's largest samples leave no room for that in half.
    smooth = [operation for operation in operations if operation.supports_autograd and operation.name != "half"]
    others = [operation for operation in operations if not operation.supports_autograd]
    wrong = _wrong(smooth, 3, (0, 1), True, world_size) + _wrong(others, 3, (0, 1), False, world_size)
    assert not wrong, "\n".join(wrong)
