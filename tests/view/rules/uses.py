"""How to call torch's functions by name, so that every rule is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.private import numbers

Use = Callable[[Any, Tensor], Any]

# How to ask functions of these names (as methods, in torch, torch.special and F) of a batch of 5 x 4 numbers in 0..1.
USES: list[tuple[str, Use]] = [
    (
        "abs absolute arccos arccosh arcsin arcsinh arctan arctanh negative fix imag relu selu celu hardshrink conj "
        "digamma erf erfc erfinv exp2 expit expm1 gammaln i0 log1p logit psi round sinc detach cpu "
        "adjoint "
        "numel nelement ndimension element_size is_complex is_floating_point is_conj is_neg "
        "is_signed size "
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
    ("as_strided as_strided_copy", lambda f, x: f(x, (2, 3), (8, 1), 2)),
    ("as_strided_scatter", lambda f, x: f(x, torch.zeros(2, 3), (2, 3), (8, 1), 2)),
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
    (
        "cholesky cholesky_ex cholesky_inverse det inverse inv inv_ex logdet slogdet pinverse pinv qr svd svdvals "
        "eigh eigvalsh lu lu_factor lu_factor_ex ldl_factor ldl_factor_ex geqrf matrix_exp matrix_rank matrix_norm "
        "norm cond vector_norm",
        lambda f, x: f(_matrices(x), *(("fro", (1, 2)) if f.__name__ == "linalg_norm" else ())),
    ),
    ("eig eigvals", lambda f, x: f(_matrices(x).tril())),
    ("matrix_power", lambda f, x: f(_matrices(x), 3)),
    ("cholesky_solve", lambda f, x: f(x[..., None], _matrices(x).tril())),
    ("lu_solve", lambda f, x: _solved(f, x)),
    ("ldl_solve", lambda f, x: f(*torch.linalg.ldl_factor(_matrices(x)), x[..., None])),
    ("solve solve_ex", lambda f, x: f(_matrices(x), x[..., None])),
    ("solve_triangular", lambda f, x: f(_matrices(x).tril(), x[..., None], upper=False)),
    ("triangular_solve", lambda f, x: f(x[..., None], _matrices(x).tril())),
    ("householder_product orgqr", lambda f, x: f(_matrices(x), x)),
    ("matmul", lambda f, x: f(_matrices(x), _matrices(x))),
    ("vecdot", lambda f, x: f(x, x * 2)),
    ("cross", lambda f, x: f(x[:, :3], x[:, 1:], dim=1)),
    ("allclose", lambda f, x: f(x, x + 1e-12)),
    ("diagonal diagonal_copy", lambda f, x: f(_matrices(x), dim1=1, dim2=2)),
    ("dim_order", lambda f, x: f(x)),
    ("flipud", lambda f, x: f(x.t()).t()),
    ("msort", lambda f, x: f(x.t()).t()),
    ("rot90", lambda f, x: f(_matrices(x), 1, (1, 2))),
    ("renorm renorm_", lambda f, x: f(x * 1, 2, 0, 0.5)),
    ("unfold", lambda f, x: f(x, 1, 2, 1)),
    ("unfold_copy", lambda f, x: f(x, 1, 2, 1)),
    ("nanquantile", lambda f, x: f(x, 0.5, dim=1)),
    ("unsafe_chunk", lambda f, x: f(x, 2, 1)),
    ("unsafe_split split_copy", lambda f, x: f(x, 2, 1)),
    ("unsafe_split_with_sizes split_with_sizes_copy", lambda f, x: f(x, [1, 3], 1)),
    ("unbind_copy", lambda f, x: f(x, 1)),
    ("select_copy", lambda f, x: f(x, 1, 2)),
    ("permute_copy", lambda f, x: f(x, (1, 0))),
    ("transpose_copy", lambda f, x: f(x, 0, 1)),
    ("t_copy detach_copy", lambda f, x: f(x)),
    ("stft", lambda f, x: f(x, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True)),
    ("istft", lambda f, x: f(x[:, :3, None] * torch.ones(3, dtype=torch.cdouble), 4, window=torch.ones(4).double())),
    ("constant_pad_nd", lambda f, x: f(x, (1, 1), 2.0)),
    ("fftshift ifftshift", lambda f, x: f(x, dim=1)),
    ("gradient", lambda f, x: f(x, dim=1)),
    ("fake_quantize_per_tensor_affine", lambda f, x: f(x.float(), 0.1, 0, 0, 255)),
    ("fake_quantize_per_channel_affine", lambda f, x: f(x.float(), torch.ones(4), torch.zeros(4).int(), 1, 0, 255)),
    ("searchsorted", lambda f, x: f(torch.linspace(0, 1, 5).double(), x) + f(x.sort(1).values, x)),
    ("layer_norm", lambda f, x: f(x, (4,))),
    (
        "conv_tbc",
        lambda f, x: f(x.t()[..., None].contiguous(), torch.ones(2, 1, 3).double(), torch.zeros(3).double()),
    ),
    ("bilinear", lambda f, x: f(x, x, torch.ones(2, 4, 4).double())),
    ("native_channel_shuffle", lambda f, x: f(_images(x), 2)),
    ("row_stack", lambda f, x: f([x, x])),
    ("logsumexp", lambda f, x: f(x, 1)),
    ("view_as_complex view_as_complex_copy", lambda f, x: f(x.reshape(5, 2, 2))),
    ("view_as_real view_as_real_copy", lambda f, x: f(torch.complex(x, x))),
    ("index_fill index_fill_", lambda f, x: f(x * 1, 1, torch.tensor([2, 0]), 0.5)),
    ("index_put index_put_", lambda f, x: f(x * 1, (torch.arange(5)[:, None], torch.tensor([2, 0])), x[:, :2])),
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
    ("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__", lambda f, x: f(x * 1, 2)),
    ("bool byte char short int long half float double bfloat16 cfloat cdouble chalf", lambda f, x: f(x)),
]
# Those that say something of a rank's memory, which is not one device's.
OWN = "data_ptr const_data_ptr storage_offset record_stream cuda xpu pin_memory untyped_storage"


def _how_to_drop(f: Any) -> tuple[Any, ...]:
    return (0.5, True) if f.__name__ != "rrelu" else (0.1, 0.3, True)


def _at(f: Any, x: Tensor) -> Any:
    how = ("prod",) if "reduce" in f.__name__ else ()
    return f(x * 1, 1, torch.tensor([2, 0]), x[:, :2], *how)


def _matrices(x: Tensor) -> Tensor:
    """(5, 4, 4): positive definite."""
    return x[:, :, None] * x[:, None, :] + 4 * torch.eye(4, dtype=x.dtype)


def _solved(f: Any, x: Tensor) -> Any:
    factors, pivots = torch.linalg.lu_factor(_matrices(x))
    return f(factors, pivots, x[..., None]) if "linalg" in f.__name__ else f(x[..., None], factors, pivots)


def _images(x: Tensor) -> Tensor:
    return x[:, :, None, None] * torch.arange(1.0, 17.0, dtype=x.dtype).view(4, 4)


def _backward(f: Any, x: Tensor) -> Any:
    if f is torch.autograd.backward and numbers(torch.__version__) < (2, 11):
        return None  # does not ask batches; duoka does so: tests/plain/test_autograd.py
    x.requires_grad_()
    f(x * 3, torch.ones(x.shape, dtype=x.dtype))
    return x.grad
