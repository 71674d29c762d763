"""What is wrong with one row stays in that row, wherever a rule keeps rows apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import Turns, on_ranks, shared
from tests.view.rules.test_against_torch import SHARED, _inputs
from tests.view.rules.test_layers import LAYERS, N, layer_inputs

ROW = 1
SPOILING = {"nan": float("nan"), "infinity": float("inf"), "huge": 1e200}
# These compare each row with all others, or raise.
_PAIRS = ("matrices", "pairs", "pairs of labels", "pairs in place", "einsum rows of both", "outer product")
LEFT_OUT = (*_PAIRS, "batch_norm in training")


def rows_but(out: BatchTensor, row: int) -> Tensor:
    """This rank's rows of a batch without one of the whole batch's."""
    spec = out._spec
    apart = out._local.detach().unflatten(spec.dim, (spec.outer, spec.partition.rows, spec.inner))
    kept = [place for place in range(spec.partition.rows) if spec.partition.start + place != row]
    return apart.index_select(spec.dim + 1, torch.tensor(kept, dtype=torch.long))


def _compare(given: dict[str, Tensor], use: Any, spoiled: float, plain: str) -> None:
    def on_rank(view: View) -> list[list[Tensor]]:
        found = []
        for value in (None, spoiled):
            values = {name: tensor.clone() for name, tensor in given.items()}
            for name in ("x", "y"):
                if value is not None:
                    values[name][ROW] = value
            torch.manual_seed(3)
            out = use({n: tensor if n in plain else shared(view, tensor) for n, tensor in values.items()})
            batches = [leaf for leaf in tree_leaves(out) if isinstance(leaf, BatchTensor)]
            found.append(
                [rows_but(leaf, ROW) for leaf in batches if type(leaf._spec.partition) is Partition]
            )  # not packed
        return found

    for before, after in on_ranks(2, on_rank, Turns(2)):
        assert before
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(other, one, equal_nan=True)


@pytest.mark.parametrize("how", SPOILING)
def test_rows_stay_apart(how: str) -> None:
    for name, operation in SHARED.items():
        if name not in LEFT_OUT:
            _compare(_inputs(N, 1), lambda given, of=operation: of(**given), SPOILING[how], "wv")


@pytest.mark.parametrize("how", SPOILING)
def test_rows_of_layers_stay_apart(how: str) -> None:
    for _, use in LAYERS.values():
        _compare(layer_inputs(N), use, SPOILING[how], "w")
