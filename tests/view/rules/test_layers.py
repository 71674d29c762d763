"""Recurrent layers and attention, with draws and masks inside of the operator: values, gradients, no gathering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from duoka.view.rules import recurrent
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import in_turns, shared, whole_of

Use = Callable[[dict[str, Tensor]], Any]  # x, y: (n, 4, 6) rows; pad, lengths: (n, 4) and (n,) rows; w: (6, 6) whole
N, HEADS = 5, 2


def _layer(kind: type[nn.Module], *sizes: int, **how: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return kind(*sizes, **how).double()


def _recurrent(kind: type[nn.Module], batch_first: bool = True, **how: Any) -> tuple[nn.Module, Use]:
    layer = _layer(kind, 6, 6, batch_first=batch_first, **how)
    return layer, lambda g: layer(g["x"] if batch_first else g["x"].transpose(0, 1))


def _with_states(of_rows: bool) -> tuple[nn.Module, Use]:
    layer = _layer(nn.LSTM, 6, 6, num_layers=2, batch_first=True, dropout=0.5)

    def use(g: dict[str, Tensor]) -> Any:
        first = g["y"][:, :2].transpose(0, 1) if of_rows else g["w"][0].expand(2, len(g["x"]), 6)
        return layer(g["x"], (first.contiguous(), torch.zeros(2, len(g["x"]), 6, dtype=torch.float64)))

    return layer, use


def _cell(kind: type[nn.Module], **how: Any) -> tuple[nn.Module, Use]:
    layer = _layer(kind, 6, 6, **how)

    def use(g: dict[str, Tensor]) -> Any:
        state, states = None, []
        for x in g["x"].unbind(1):
            state = layer(x, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)

    return layer, use


def _packed(
    kind: type[nn.Module], lengths: Callable[[Tensor], Any] = Tensor.cpu, states: bool = False, **how: Any
) -> tuple[nn.Module, Use]:
    layer = _layer(kind, 6, 6, **{"batch_first": True, **how})
    first, is_sorted = layer.batch_first, lengths is _descending

    def use(g: dict[str, Tensor]) -> Any:
        x, y = (g["x"], g["y"]) if first else (g["x"].transpose(0, 1), g["y"].transpose(0, 1))
        packed, other = (
            nn.utils.rnn.pack_padded_sequence(of, lengths(g["lengths"]), first, enforce_sorted=is_sorted)
            for of in (x, y)
        )
        assert torch.equal(packed.batch_sizes, other.batch_sizes)
        mixed = packed._replace(data=(packed.data * other.data.tanh()) @ g["w"])
        given = g["y"][:, :1].transpose(0, 1).contiguous() if states else None
        out, state = layer(mixed, given) if states else layer(mixed)
        padded, counts = nn.utils.rnn.pad_packed_sequence(out, first, -1.0, total_length=5 if is_sorted else None)
        assert torch.equal(counts, torch.as_tensor(lengths(whole_of(g["lengths"]))))
        return padded, out.data.relu(), state

    return layer, use


def _descending(lengths: Tensor) -> list[int]:
    return ([4, 4, 3, 2, 2, 1, 1, 1] + [1] * len(lengths))[: len(lengths)]


def _attention(how: Callable[[dict[str, Tensor]], dict[str, Any]], **of: Any) -> tuple[nn.Module, Use]:
    layer = _layer(nn.MultiheadAttention, 6, HEADS, **{"batch_first": True, **of})
    if not layer.batch_first:
        return layer, lambda g: layer(*(g[name].transpose(0, 1) for name in "xyy"), **how(g))
    return layer, lambda g: layer(g["x"], g["y"], g["y"], **how(g))


def _causal(rows: int = 4) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def _with_queries(g: dict[str, Tensor]) -> Tensor:
    """Learned queries of what is in a row."""
    heads = g["x"].view(len(g["x"]), 4, HEADS, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(g["w"].view(HEADS, 6, 3), heads, heads)


def _heads(x: Tensor) -> Tensor:
    return x.view(len(x), 4, HEADS, 3).transpose(1, 2)


def _fused(**how: Any) -> tuple[nn.Module, Use]:
    return nn.Module(), lambda g: F.scaled_dot_product_attention(
        _heads(g["x"]), _heads(g["y"]), _heads(g["y"]), **how
    )


LAYERS: dict[str, tuple[nn.Module, Use]] = {
    "lstm": _recurrent(nn.LSTM),
    "lstm, time first": _recurrent(nn.LSTM, batch_first=False, num_layers=2, bidirectional=True),
    "lstm, dropout": _recurrent(nn.LSTM, num_layers=3, bidirectional=True, dropout=0.4),
    "lstm, time first, dropout": _recurrent(nn.LSTM, batch_first=False, num_layers=2, dropout=0.4),
    "lstm, projections": _recurrent(nn.LSTM, num_layers=2, proj_size=3, dropout=0.4),
    "lstm, states of rows": _with_states(of_rows=True),
    "lstm, plain states": _with_states(of_rows=False),
    "gru": _recurrent(nn.GRU, num_layers=2, bidirectional=True, bias=False),
    "gru, dropout": _recurrent(nn.GRU, num_layers=2, dropout=0.5),
    "rnn": _recurrent(nn.RNN, num_layers=2, dropout=0.5),
    "rnn, relu": _recurrent(nn.RNN, nonlinearity="relu"),
    "lstm cell": _cell(nn.LSTMCell),
    "gru cell": _cell(nn.GRUCell),
    "rnn cell": _cell(nn.RNNCell),
    "rnn cell, relu": _cell(nn.RNNCell, nonlinearity="relu"),
    "packed lstm": _packed(nn.LSTM, num_layers=2, bidirectional=True),
    "packed lstm, dropout": _packed(nn.LSTM, Tensor.tolist, batch_first=False, num_layers=3, dropout=0.4),
    "packed lstm, sorted": _packed(nn.LSTM, _descending),
    "packed gru, states of rows": _packed(nn.GRU, states=True),
    "packed rnn": _packed(nn.RNN, num_layers=2, dropout=0.4),
    "attention": _attention(lambda g: {}),
    "attention, padded": _attention(lambda g: {"key_padding_mask": g["pad"], "need_weights": False}),
    "attention, dropout": _attention(lambda g: {"key_padding_mask": g["pad"]}, dropout=0.3),
    "attention, fused, dropout": _attention(lambda g: {"need_weights": False}, dropout=0.3),
    "attention, causal": _attention(lambda g: {"attn_mask": _causal(), "is_causal": True, "need_weights": False}),
    "attention, masks of rows": _attention(
        lambda g: {"attn_mask": _by_head(g), "average_attn_weights": False}, batch_first=False
    ),
    "attention, plain masks of rows": _attention(
        lambda g: {"attn_mask": torch.linspace(0, 1, len(g["x"]) * HEADS * 16).view(-1, 4, 4).double()}
    ),
    "attention, biases": _attention(lambda g: {}, add_bias_kv=True, add_zero_attn=True, dropout=0.3),
    "attention, other sizes": _attention(lambda g: {}, kdim=6, vdim=6, batch_first=False),
    "encoder": (
        encoder := _layer(
            nn.TransformerEncoder,
            _layer(nn.TransformerEncoderLayer, 6, HEADS, 12, dropout=0.2),  # type: ignore[arg-type]
            2,
            enable_nested_tensor=False,
        ),
        lambda g: encoder(g["x"].transpose(0, 1), mask=_causal(), is_causal=True),
    ),
    "transformer": (
        transformer := _layer(nn.Transformer, 6, HEADS, 1, 1, 12, batch_first=True),
        lambda g: transformer(
            g["x"],
            g["y"],
            tgt_mask=_causal(),
            src_key_padding_mask=g["pad"],
            memory_key_padding_mask=g["pad"],
            tgt_is_causal=True,
        ),
    ),
    "dot product, dropout": _fused(dropout_p=0.3),
    "dot product, causal": _fused(is_causal=True, scale=0.7),
    "dot product, mask of rows": (
        nn.Module(),
        lambda g: F.scaled_dot_product_attention(
            _heads(g["x"]), _heads(g["y"]), _heads(g["x"]), ~g["pad"][:, None, None], 0.3
        ),
    ),
    "dot product, plain mask of rows": (
        nn.Module(),
        lambda g: F.scaled_dot_product_attention(
            _heads(g["x"]), _heads(g["y"]), _heads(g["x"]), torch.eye(4).expand(len(g["x"]), 1, 4, 4).double()
        ),
    ),
    "dot product, grouped": (
        nn.Module(),
        lambda g: F.scaled_dot_product_attention(
            _heads(g["x"]), _heads(g["y"])[:, :1], _heads(g["y"])[:, :1], enable_gqa=True
        ),
    ),
    "dot product, learned queries": (nn.Module(), _with_queries),
    "dot product, whole memory": (
        nn.Module(),
        lambda g: F.scaled_dot_product_attention(g["x"][:, 0], g["w"], g["w"] * 2),
    ),
}


def _by_head(g: dict[str, Tensor]) -> Tensor:
    return (g["x"] @ g["y"].mT)[:, None].expand(-1, HEADS, 4, 4).reshape(-1, 4, 4)


def layer_inputs(n: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 5, (n,), generator=draws)
    return {
        "x": torch.randn(n, 4, 6, generator=draws, dtype=torch.float64),
        "y": torch.randn(n, 4, 6, generator=draws, dtype=torch.float64),
        "pad": torch.arange(4) >= lengths[:, None],
        "lengths": lengths,
        "w": torch.randn(6, 6, generator=draws, dtype=torch.float64),
    }


def _values(name: str, given: dict[str, Tensor], view: View | None) -> dict[str, Any]:
    """Outputs, and the gradients of x, w and the parameters."""
    layer, use = LAYERS[name]
    torch.manual_seed(3)
    used = {key: value.clone() for key, value in given.items()}
    if view is not None:
        used.update({key: shared(view, used[key]) for key in used if key != "w"})
    wanted = [used["x"].requires_grad_(), used["w"].requires_grad_(), *layer.parameters()]
    outs = [out for out in tree_leaves(use(used)) if isinstance(out, Tensor)]
    assert view is None or all(isinstance(out, BatchTensor) for out in outs), "gathered"
    weighted = [(out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sin().sum() for out in outs]
    grads = torch.autograd.grad(torch.stack(weighted).sum(), wanted, allow_unused=True)
    found = {f"out {i}": out for i, out in enumerate(outs)} | {f"gradient {i}": grad for i, grad in enumerate(grads)}
    found["next"] = torch.rand(3)
    return {key: whole_of(value) for key, value in found.items()}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_layers_are_one_device_s(name: str, world_size: int) -> None:
    given = layer_inputs(N)
    expected = _values(name, given, None)

    def on_rank(view: View) -> dict[str, Any]:
        found = _values(name, given, view)
        assert {name for name, _ in view.whole_operations} <= {"sort", "tolist"}  # of lengths
        return found

    for found in in_turns(world_size, on_rank):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=lambda text, at=key: f"{at}: {text}")


def test_packed_sequences_of_which_a_rank_has_one() -> None:
    """For a single one torch draws dropout in another shape, where they are of 32 bits."""
    layer, given = nn.LSTM(6, 6, 3, dropout=0.4), layer_inputs(3)

    def padded(x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        packed = nn.utils.rnn.pack_padded_sequence(x, given["lengths"], True, enforce_sorted=False)
        return [whole_of(nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0]), torch.rand(3)]

    expected = padded(given["x"].float())
    for found in in_turns(2, lambda view: padded(shared(view, given["x"].float()))):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["lstm", "gru", "packed lstm", "lstm, plain states"])
def test_states_have_no_gaps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN refuses others, and the samples are their second dimension."""
    computed, states_of = [], recurrent._states

    def states(*args: Any) -> Any:
        computed.append(states_of(*args))
        return computed[-1]

    monkeypatch.setattr(recurrent, "_states", states)
    list(in_turns(2, lambda view: _values(name, layer_inputs(N), view)))
    assert computed
    assert all(state.is_contiguous() for state in tree_leaves(computed))


@pytest.mark.parametrize("name", ["lstm, dropout", "gru, dropout", "packed lstm, dropout", "lstm, states of rows"])
def test_layers_whose_kernel_draws_for_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's, which each rank calls with all rows."""
    given = layer_inputs(N)
    expected = _values(name, given, None)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)

    def on_rank(view: View) -> dict[str, Any]:
        found = _values(name, given, view)
        assert any("lstm" in operation or "gru" in operation for operation, _ in view.whole_operations)
        return found

    for found in in_turns(3, on_rank):
        torch.testing.assert_close(found, expected)
