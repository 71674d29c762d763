"""Attention in evaluation: each rank's rows take torch's fast path, where one device's batch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.view.nets import Part, check, normal, watched

__all__ = ["watched"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
SHAPE = (6, 4, 8)  # samples, positions, features
LAST = torch.arange(4) >= torch.tensor([4, 1, 3, 2, 4, 2])[:, None]
FIRST_IN_ONE = LAST.clone()
FIRST_IN_ONE[0] = torch.tensor([True, False, False, False])
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)


@pytest.fixture(autouse=True)
def _modules_are_watched(watched: None) -> None:
    torch.manual_seed(3)


def layer(**how: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **how)


def encoder(change: Callable[[Any], object] = lambda module: None, **how: Any) -> nn.Module:
    module = nn.TransformerEncoder(layer(**how), 2).eval()
    change(module)
    return module


class Before(Part):
    """A layer, and attention within the call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), inner

    def forward(self, x: Tensor, *given: Any, **how: Any) -> Any:
        x = self.first(x)
        return self.inner(*[x] * (3 if isinstance(self.inner, nn.MultiheadAttention) else 1), *given, **how)


class MeanOfAll(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return src - src.mean()


def attention(**how: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True, **how)


APART = {
    "encoder": (encoder, {}),
    "padding last": (encoder, {"src_key_padding_mask": LAST}),
    "causal": (encoder, {"mask": CAUSAL, "is_causal": True}),
    "odd heads": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 1, 9, batch_first=True), 2), {}),
    "gelu": (lambda: encoder(activation=nn.GELU(), norm_first=True, bias=False), {"src_key_padding_mask": LAST}),
    "layer": (layer, {"src_key_padding_mask": FIRST_IN_ONE}),
    "attention": (attention, {}),
    "attention with masks": (attention, {"key_padding_mask": LAST, "attn_mask": CAUSAL}),
    "weights of each head": (lambda: attention(add_bias_kv=True), {"average_attn_weights": False}),
}
TOGETHER = {
    "padding first in a row": (encoder, {"src_key_padding_mask": FIRST_IN_ONE}),
    "a hook": (
        lambda: encoder(lambda it: it.layers[1].linear1.register_forward_hook(lambda _, args, out: out - out.mean())),
        {},
    ),
    "own function": (lambda: layer(activation=lambda x: F.relu(x) - x.mean()), {}),
    "own layer": (lambda: nn.TransformerEncoder(MeanOfAll(8, 2, 12, batch_first=True), 2), {}),
    "own forward": (lambda: encoder(lambda it: setattr(it.layers[0].norm1, "forward", lambda x: x - x.mean())), {}),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_one_device_s_numbers(name: str, mode: Any) -> None:
    build, how = {**APART, **TOGETHER}[name]
    masks = [value for mask, value in how.items() if "padding" in mask]
    others = {mask: value for mask, value in how.items() if "padding" not in mask}

    def run(model: Any, x: Tensor, *masks: Tensor) -> Any:
        named = dict(zip([mask for mask in how if "padding" in mask], masks, strict=True))
        with mode():
            return [model(x, **named, **others), model(x + 1, **named, **others)]

    built = build()
    for world_size in (2, 3):
        found = check(lambda: Before(built).eval(), run, [normal(*SHAPE), *masks], world_size, rows=(0, 1))
        if name in APART and "padding last" not in name and "gelu" not in name:
            assert found == [["apart"] * 2] * world_size


def test_an_encoder_that_is_frozen_but_for_a_layer() -> None:
    """torch asks whether any parameter requires gradients, where these are recorded."""

    def run(model: Any, x: Tensor, padding: Tensor) -> Any:
        out = [model(x, src_key_padding_mask=padding) for _ in range(2)]
        model.inner.layers[1].linear2.bias.requires_grad_()
        return [*out, model(x, src_key_padding_mask=None)]

    built = encoder().requires_grad_(False)
    check(lambda: Before(built).requires_grad_(False).eval(), run, [normal(*SHAPE), LAST], rows=(0, 1))


def test_a_part_in_training_draws_as_on_one_device() -> None:
    def run(model: Any, x: Tensor) -> Any:
        model.eval()
        model.inner.layers[0].dropout.train()
        with torch.no_grad():
            return [model(x) for _ in range(3)]

    built = encoder(dropout=0.4)
    check(lambda: Before(built), run, [normal(*SHAPE)])


def test_errors_tell_one_device_s_shapes() -> None:
    def run(model: Any, x: Tensor) -> Any:
        with torch.no_grad(), pytest.raises(RuntimeError) as raised:
            model(x, mask=torch.zeros(3, 3))
        return str(raised.value)

    built = encoder()
    check(lambda: Before(built).eval(), run, [normal(*SHAPE)])
