"""Torch functions that may raise for the values of some rows: an index out of range, an invalid probability.

Only the rank with such a row gets the error, and the script may catch it and continue. So after each of these
functions the ranks exchange one number, whether any has failed. If so, all compute the function whole and raise the
error of one device. GPUs check indices asynchronously and end the process, so they need no exchange.

Why: docs/decisions/0118-errors-of-some-rows.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.lookup import functions
from duoka.view.tensor.batch import BatchTensor

_INDEXING = """
embedding embedding_bag gather take_along_dim index_select take cross_entropy nll_loss multi_margin_loss
multilabel_margin_loss one_hot index_put index_put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce
scatter_reduce_ index_add index_add_ index_copy index_copy_ max_unpool1d max_unpool2d max_unpool3d
"""
_MATRICES = """
cholesky cholesky_inverse inverse inv solve eig eigh eigvals eigvalsh svd svdvals pinv lu lu_factor ldl_factor lstsq
matrix_rank cond tensorinv tensorsolve
"""

BY_ITEM = (Tensor.__getitem__, Tensor.__setitem__)
_BY_INDEX = frozenset({*functions(_INDEXING), *BY_ITEM})
_BY_VALUE = frozenset({F.binary_cross_entropy, F.gaussian_nll_loss})
_BY_MATRIX = frozenset(functions(_MATRICES, (Tensor, torch, torch.linalg)))
RAISES_FOR_ROWS = _BY_INDEX | _BY_VALUE | _BY_MATRIX


def may_fail(func: Any, args: tuple[Any, ...], batches: Sequence[BatchTensor]) -> bool:
    """Return True if a function of RAISES_FOR_ROWS can raise an error for some rows of the batches in `args`."""
    if func in _BY_MATRIX:
        return True
    if batches[0].device.type != "cpu":
        return False
    if func in BY_ITEM and args[0] is batches[0]:  # the tensor that is indexed is not an index
        batches = batches[1:]
    return func in _BY_VALUE or any(
        not batch.dtype.is_floating_point and batch.dtype != torch.bool for batch in batches
    )
