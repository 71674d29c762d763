from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from duoka.errors import Refused
from duoka.view.dispatch import dispatch
from duoka.view.shares.local import ExactShares
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View, exact_view
from tests.view.ranks import in_turns, on_ranks, shared, whole_of


def whole(n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n * width))


def both(work: Any, world_size: int = 2) -> list[Any]:
    """`work(x)` on one device, and on each of several ranks."""

    def on_rank(view: View) -> Any:
        return tree_map(whole_of, work(shared(view, whole())))

    return [work(whole()), *on_ranks(world_size, on_rank)]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.sum(input=x, dim=1),
        lambda x: F.softmax(input=x, dim=0),
        lambda x: F.linear(input=x, weight=whole(3)),
        lambda x: torch.where(condition=x > 0, input=x, other=-x),
        lambda x: torch.searchsorted(torch.tensor([0.0, 1.0]), input=x),
    ],
    ids=["sum", "softmax", "linear", "where", "searchsorted"],
)
def test_the_input_may_be_named(work: Any) -> None:
    expected, *found = both(work)
    for out in found:
        torch.testing.assert_close(out, expected)


def test_an_out_argument_is_written() -> None:
    def work(x: Tensor) -> Tensor:
        torch.mul(x, 2, out=x)
        return x

    expected, *found = both(work)
    for out in found:
        torch.testing.assert_close(out, expected)


def test_what_a_rule_does_not_fit_is_computed_whole() -> None:
    def on_rank(view: View) -> list[Any]:
        x = shared(view, whole())
        out = [torch.sort(x, 0).values, torch.special.entr(x.abs())]
        return [[whole_of(one) for one in out], [name for name, _ in view.whole_operations]]

    for out, names in on_ranks(2, on_rank):
        torch.testing.assert_close(out, [whole().sort(0).values, torch.special.entr(whole().abs())])
        assert "sort" in names


@pytest.mark.parametrize("repeated", [False, True])
def test_errors_name_the_shapes_of_the_whole_batch(repeated: bool) -> None:
    def on_rank(view: View) -> None:
        x = shared(view, whole())
        for _ in range(1 + 2 * repeated):
            x @ whole(4, 3)
            with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x4 and 5x3\)"):
                x @ whole(5, 3)
            with pytest.raises(
                RuntimeError, match=r"The size of tensor a \(6\) must match the size of tensor b \(5\)"
            ):
                x + whole(5)

    on_ranks(2, on_rank)


SCORES = torch.linspace(0.1, 0.8, 18).view(6, 3)
IDS = torch.tensor([0, 1, 2, 0, 1, 7])
MATRICES = torch.stack([torch.eye(2)] * 4 + [-torch.eye(2)] * 2)


@pytest.mark.parametrize("shares", [0, 4], ids=["ranks", "exact"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("work", "good", "bad"),
    [
        (lambda ids: F.embedding(ids, SCORES), IDS.clamp(max=2), IDS),
        (lambda ids: SCORES[ids], IDS.clamp(max=2), IDS),
        (lambda ids: F.cross_entropy(SCORES, ids), IDS.clamp(max=2), IDS),
        (lambda x: F.binary_cross_entropy(x, torch.ones(6, 3)), SCORES, SCORES + 0.5),
        (torch.linalg.cholesky, -MATRICES[[4] * 6], MATRICES),
    ],
    ids=["embedding", "index", "cross_entropy", "binary_cross_entropy", "cholesky"],
)
def test_an_error_of_some_rows_is_every_rank_s(
    work: Any, good: Tensor, bad: Tensor, again: bool, shares: int
) -> None:
    """The script may catch it: then all ranks do, and go on together."""
    with pytest.raises((IndexError, RuntimeError)) as expected:
        work(bad)

    def on_rank(one: View) -> Any:
        view = one
        if shares:
            view = exact_view(ExactShares(one.ranks, (shares - 1, 1)), lambda leaf: None, lambda _, leaf: leaf, print)
        for _ in range(2 * again):
            work(BatchTensor.of(good, view))
        with pytest.raises(expected.type) as found:
            work(BatchTensor.of(bad, view))
        return [str(found.value), whole_of(work(BatchTensor.of(good, view)))]

    for text, out in on_ranks(2, on_rank):
        assert text == str(expected.value)
        torch.testing.assert_close(out, work(good))


def test_ranks_agree_once_on_the_indices_of_an_embedding() -> None:
    good = IDS.clamp(max=2)

    def on_rank(view: View) -> list[int]:
        agreements = []
        agree = view.ranks._agree
        view.ranks._agree = lambda failed: (agreements.append(failed), agree(failed))[1]  # type: ignore[method-assign]
        ids, counts = shared(view, good), []

        def look_up(weight: Tensor) -> None:
            out = F.embedding(ids, weight)
            torch.testing.assert_close(whole_of(out), F.embedding(whole_of(ids), weight))
            counts.append(len(agreements))

        look_up(SCORES)
        look_up(SCORES)
        look_up(torch.cat([SCORES, SCORES]))
        look_up(SCORES)
        with pytest.raises(IndexError):
            look_up(SCORES[:2])
        look_up(SCORES)
        ids.clamp_(max=1)
        look_up(SCORES[:2])
        look_up(SCORES[:2])
        ids.copy_(torch.tensor([0, 0, 0, 0, 0, 7]))
        with pytest.raises(IndexError):
            look_up(SCORES)
        ids.data = torch.tensor([0, 0, 0, 0, 0, 6])
        with pytest.raises(IndexError):
            look_up(SCORES)
        return counts

    assert on_ranks(2, on_rank) == [[1, 1, 1, 1, 2, 3, 3]] * 2


def test_a_refusal_is_remembered() -> None:
    def on_rank(view: View) -> Refused | None:
        with pytest.raises(Refused):
            shared(view, whole()).share_memory_()
        return view.refusal

    assert all("share_memory_" in str(refusal) for refusal in on_ranks(2, on_rank))


def test_a_batch_of_several_shares_is_computed_share_by_share() -> None:
    def on_rank(one: View) -> Any:
        view = exact_view(ExactShares(one.ranks, (3, 1)), lambda leaf: None, lambda _, leaf: leaf, print)
        x = BatchTensor.of(whole(), view)
        torch.manual_seed(2)
        out = [x * 2, x.sum(), x.mean(0), F.dropout(x, 0.5), x.sort(0).values, F.dropout(x, 0.5), x.add_(1)]
        assert out[-1] is x
        with pytest.raises(RuntimeError, match="6x4 and 5x3"):
            x @ whole(5, 3)
        return [whole_of(value) for value in out] + [torch.rand(2)]

    x = whole()
    torch.manual_seed(2)
    expected = [
        x * 2,
        x.sum(),
        x.mean(0),
        F.dropout(x, 0.5),
        x.sort(0).values,
        F.dropout(x, 0.5),
        x + 1,
        torch.rand(2),
    ]
    for found in in_turns(2, on_rank):
        torch.testing.assert_close(found, expected)


def test_sparse_operands() -> None:
    sparse = torch.eye(6).to_sparse()
    expected, *found = both(lambda x: (torch.sparse.mm(sparse, x), x.to_sparse().to_dense()))
    for out in found:
        torch.testing.assert_close(out, expected)


def test_a_module_s_parameters_are_wrapped_once_for_each_tensor() -> None:
    layer, adopted = nn.Linear(4, 2), list[Any]()

    def on_rank(one: View) -> None:
        view = View(one.ranks, adopt=adopted.append)
        for _ in range(3):
            layer(shared(view, whole())).sum()
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
        layer(shared(view, whole())).sum()

    old = layer.weight
    on_ranks(1, on_rank)
    assert [id(leaf) for leaf in adopted] == [id(old), id(layer.bias), id(layer.weight)]


def test_what_autograd_saves_of_a_single_row_is_asked_once_for_each_kind_of_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    saves = dispatch.saves_copies_of
    monkeypatch.setattr(dispatch, "saves_copies_of", lambda *call: asked.append(call[0]) or saves(*call))
    lstm = nn.LSTM(4, 3, 2, dropout=0.1, batch_first=True)  # which draws, so that its calls are not recorded

    def on_rank(view: View) -> None:
        for _ in range(6):
            lstm(shared(view, whole(2, 12).view(2, 3, 4)))

    on_ranks(2, on_rank)
    assert 0 < asked.count(torch.lstm) <= 2
