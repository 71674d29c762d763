"""What values cannot tell: forward passes that read, keep or write something of the batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duoka.view.learning import Learning, Mixed
from tests.view.modules import Net, Run, check, normal, plainly, watched

__all__ = ["watched"]

KEPT: list[Any] = []
COUNT = 0


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(7)
    KEPT.clear()
    globals()["COUNT"] = 0


class Wide(Net):
    """With more to write to."""

    def __init__(self, then: Run) -> None:
        super().__init__(then)
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.slow = nn.Linear(6, 6)
        self.normed = nn.InstanceNorm1d(4, track_running_stats=True)
        self.table = nn.Embedding(5, 6, max_norm=0.5)
        self.often = nn.Embedding(5, 6, scale_grad_by_freq=True)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("cache", None)
        self.kept: list[Any] = []


def _codebook(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.codes.lerp_(x.mean((0, 1)), 0.5)
    return x + m.codes


def _codebook_s_data(m: Any, x: Tensor) -> Tensor:
    m.codes.data = 0.5 * m.codes.data + x.detach().mean((0, 1))
    return x + m.codes


def _momentum(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, fast in zip(m.slow.parameters(), m.first.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    return x - m.slow(x).detach()


def _counted(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    return x * m.steps


def _cached(m: Any, x: Tensor) -> Tensor:
    if m.cache is None:
        m.cache = torch.arange(24.0).view(4, 6)
    return x + m.cache


def _branch(m: Any, x: Tensor) -> Tensor:
    return x * 0.5 if x.detach().abs().max() > 8 else x


def _length(m: Any, x: Tensor) -> Tensor:
    return x * (1 + int((x > 0).sum(1).max()))


def _through_numpy(m: Any, x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().std())


def _listed(m: Any, x: Tensor) -> Tensor:
    return x * max(x.flatten().tolist())


def _hooked(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x.tanh()


def _caught(m: Any, x: Tensor) -> Tensor:
    try:
        largest = x.max().item()
    except Exception:
        largest = 1.0
    return x * largest


def _kept_outside(m: Any, x: Tensor) -> Tensor:
    KEPT.append(x.detach())
    return x


def _counted_outside(m: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += x.shape[0]
    return x * COUNT


def _normed(m: Any, x: Tensor) -> Tensor:
    return m.normed(x)  # type: ignore[no-any-return]


def _looked_up(m: Any, x: Tensor) -> Tensor:
    return x + m.table((x * 3).detach().long() % 5).sum(2)


def _looked_up_by_frequency(m: Any, x: Tensor) -> Tensor:
    return x + m.often((x * 3).detach().long() % 5).sum(2)


OPENED = [
    _codebook,
    _codebook_s_data,
    _branch,
    _length,
    _through_numpy,
    _listed,
    _hooked,
    _caught,
    _normed,
    _looked_up,
    _looked_up_by_frequency,
]
CUT = [_momentum, _counted, _cached]


def _steps(model: Any, *batches: Tensor) -> Any:
    found = []
    for batch in batches:
        found.append(plainly(model, batch))
        found.append({name: value.clone() for name, value in model.state_dict().items()})
        found.append([len(KEPT), KEPT[-1].sum() if KEPT else 0])
    return found


OUTSIDE = [_kept_outside, _counted_outside]  # which ranks that are threads share


@pytest.mark.parametrize("then", OPENED + CUT)
def test_it_leaves_what_one_device_would(then: Run) -> None:
    KEPT.clear()
    data = [normal(5, 4, 6) * scale for scale in (1, 2, 30)]
    check(lambda: Wide(then), _steps, data, rows=(0, 1, 2))


@pytest.mark.parametrize("then", OPENED + CUT + OUTSIDE)
def test_what_depends_on_the_batch_is_noticed_and_put_back(then: Run) -> None:
    model = Wide(then)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, learning = normal(6, 4, 6), Learning(model)

    def learn() -> Any:
        return learning.learn(lambda start, stop: model(learning.given(whole[start:stop])), 6)

    if then in CUT:
        assert len(learn().outputs) == 1
    else:
        with pytest.raises(Mixed, match=r"^it \w+"):
            learn()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (KEPT, COUNT, model.cache) == ([], 0, None)


def test_what_is_counted_in_variables_around_is_noticed_and_put_back() -> None:
    rows, seen = 0, {"rows": 0, "calls": 0}

    def by_name(m: Any, x: Tensor) -> Tensor:
        nonlocal rows
        rows += x.shape[0]
        return x

    def by_entry(m: Any, x: Tensor) -> Tensor:
        seen["rows"] += x.shape[0]
        return x

    def calls(m: Any, x: Tensor) -> Tensor:
        seen["calls"] += 1
        return x

    whole = normal(6, 4, 6)
    for then, mixes in ((by_name, True), (by_entry, True), (calls, False)):
        model = Net(then)
        learning = Learning(model)
        with pytest.raises(Mixed, match="it counts the rows") if mixes else nullcontext():
            learning.learn(lambda start, stop, m=model, one=learning: m(one.given(whole[start:stop])), 6)  # type: ignore
        assert (rows, seen) == (0, {"rows": 0, "calls": 0})
