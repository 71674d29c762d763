"""Torch functions that raise for the values of rows: an index out of range, a probability that is none.

Such an error is that of the rank that has the row, and a script may catch it and go on. So before anyone goes on, the
ranks ask each other whether any has failed, an exchange of a number for each of these functions; if so, the function
is computed whole, and raises what it raises on one device. GPUs check indices in their own time, and end the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.batch import BatchTensor
from duoka.view.rules.lookup import functions

_INDEXING = """
embedding embedding_bag gather take_along_dim index_select take cross_entropy nll_loss multi_margin_loss
multilabel_margin_loss one_hot index_put index_put_ scatter scatter_ scatter_add scatter_add_ scatter_reduce
scatter_reduce_ index_add index_add_ index_copy index_copy_ max_unpool1d max_unpool2d max_unpool3d
"""
_MATRICES = """
cholesky cholesky_inverse inverse inv solve eig eigh eigvals eigvalsh svd svdvals pinv lu lu_factor ldl_factor lstsq
matrix_rank cond tensorinv tensorsolve
"""

_BY_ITEM = (Tensor.__getitem__, Tensor.__setitem__)
_BY_INDEX = frozenset({*functions(_INDEXING), *_BY_ITEM})
_BY_VALUE = frozenset({F.binary_cross_entropy, F.gaussian_nll_loss})
_BY_MATRIX = frozenset(functions(_MATRICES, (Tensor, torch, torch.linalg)))
MAY_FAIL = _BY_INDEX | _BY_VALUE | _BY_MATRIX


def may_fail(func: Any, args: tuple[Any, ...], batches: Sequence[BatchTensor]) -> bool:
    """Whether a function of MAY_FAIL can raise an error for some rows of these batches, which are in `args`."""
    if func in _BY_MATRIX:
        return True
    if batches[0].device.type != "cpu":
        return False
    if func in _BY_ITEM and args[0] is batches[0]:  # what an index takes entries of is no index itself
        batches = batches[1:]
    return func in _BY_VALUE or any(
        not batch.dtype.is_floating_point and batch.dtype != torch.bool for batch in batches
    )
