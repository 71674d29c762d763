"""The engine in C: it describes calls as that in Python does, keeps nothing alive, and finds the same programs."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from duoka.collectives.base import OneRank
from duoka.errors import Refused
from duoka.private.torch import AsPlainTensors
from duoka.view.dispatch import native
from duoka.view.dispatch.replay import DescribedCall
from duoka.view.modules.calls import ModuleCalls
from duoka.view.tensor.batch import BatchTensor, gather_all
from duoka.view.view import View
from tests.view.ranks import Turns, on_ranks

C = native.built()
pytestmark = pytest.mark.skipif(C is None, reason="the engine in C was not built")


@pytest.fixture(params=["c", "python"])
def chosen(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use(C if request.param == "c" else None)
    yield request.param
    native.install()


def batches(view: View) -> list[BatchTensor]:
    x = torch.arange(24.0).view(4, 3, 2)
    return [BatchTensor.of(x, view), BatchTensor.of(x.mT.contiguous(), view), BatchTensor.of(x[0], view, 1)]


LEAVES: list[Any] = on_ranks(1, batches)[0]
LEAVES += [torch.zeros(3), torch.zeros(3, dtype=torch.int64), nn.Parameter(torch.zeros(2, 3)), torch.zeros(2, 3).T]
LEAVES += [torch.zeros(2, 3).to_sparse(), torch.zeros(2, 2, device="meta")]
LEAVES += [0.5, 0.0, 1.0, -0.0, float("nan"), 2j, 0, 1, 7, 2**70, True, False, None, "mean", ..., torch.float16]
LEAVES += [torch.device("cpu"), torch.channels_last, slice(None), slice(1, 2), slice(None, None, 3), torch.Size([2])]
LEAVES += [{1}, object, LEAVES[3].as_subclass(type("Own", (Tensor,), {})), slice(LEAVES[4][0], 2)]
values = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip
calls = st.tuples(
    st.sampled_from([torch.add, Tensor.add, F.dropout]),
    st.lists(values, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["dim", "p"]), values, max_size=2),
)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@given(calls)
def test_the_engine_in_c_describes_calls_that_have_a_key(call: Any) -> None:
    in_python, in_c = DescribedCall(*call), C.described(*call)
    if in_c is not None:
        assert in_python.key is not None
        assert same(in_c[1], in_python.inputs)
    elif call[1] and in_python.batches:  # it leaves out what is rare
        assert in_python.key is None or has_rare((call[1], call[2]))


def has_rare(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(has_rare, value.values() if isinstance(value, dict) else value))
    if isinstance(value, Tensor):
        return value.layout is not torch.strided
    return isinstance(value, (complex, torch.device)) or (isinstance(value, int) and abs(value) >= 2**63)


@given(calls, calls)
def test_both_engines_tell_the_same_calls_apart(one: Any, other: Any) -> None:
    keys, words = [DescribedCall(*call).key for call in (one, other)], [C.described(*call) for call in (one, other)]
    if None not in words:
        assert (keys[0] == keys[1]) == (words[0][0] == words[1][0])


def test_a_call_with_too_many_parts_is_left_to_python() -> None:
    batch = LEAVES[0]
    assert C.described(torch.add, (batch, 1), {}) is not None
    assert C.described(torch.add, (batch, list(range(1000))), {}) is None
    assert C.described(torch.add, (batch, [torch.zeros(1) for _ in range(100)]), {}) is None
    assert C.described(torch.add, (batch, *range(40)), {}) is None


def test_programs_run_without_dispatch(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched = []

    def work(view: View) -> None:
        batch, weight = BatchTensor.of(torch.randn(4, 3), view), nn.Parameter(torch.randn(3, 3))
        call = native.dispatch

        def counting(func: Any, args: Any, kwargs: Any) -> Any:
            dispatched.append(func)
            return call(func, args, kwargs)

        monkeypatch.setattr(native, "dispatch", counting)
        monkeypatch.setattr(BatchTensor, "dispatch", counting)
        native.use(C if chosen == "c" else None)
        for _ in range(5):
            F.linear(batch, weight)
        with torch.inference_mode():
            F.linear(batch, weight)

    on_ranks(1, work)
    assert len(dispatched) == (3 if chosen == "c" else 6)


def test_errors_are_those_of_one_device(chosen: str) -> None:
    def work(view: View) -> None:
        batch = BatchTensor.of(torch.randn(4, 3), view)
        for wrong in (3, 3, 3, 5):
            weight = torch.randn(2, wrong)
            if wrong == 3:
                F.linear(batch, weight)
                continue
            with pytest.raises(RuntimeError) as raised:
                F.linear(batch, weight)
            with pytest.raises(RuntimeError) as expected:
                F.linear(torch.randn(4, 3), weight)
            assert str(raised.value) == str(expected.value)

    on_ranks(2, work)


def test_calls_keep_nothing_alive() -> None:
    """Nor do they release what they do not own: no count of references falls, either."""
    view = View(OneRank(), adopt=lambda leaf: None)
    batch, weight = BatchTensor.of(torch.randn(4, 3), view), nn.Parameter(torch.randn(3, 3))
    calls, layer, hooked = ModuleCalls(view), nn.LayerNorm(3), nn.LayerNorm(3)
    hooked.register_forward_hook(lambda *_: None)
    calls._ordinary.keep(nn.LayerNorm, True)
    calls._here.ordinary = calls._ordinary
    call = partial(calls.call, nn.Module.__call__)
    func, kwargs = F.linear, {"bias": None}
    leaf = BatchTensor(torch.randn(4, 3, requires_grad=True), batch._spec)
    wrongs = (
        lambda: func(batch, weight[:1, :1]),
        lambda: batch.view(5),
        lambda: batch + "text",
        lambda: leaf.add_(1.0, alpha=2),  # by the program of a batch that needs no gradient
    )
    watched = [func, kwargs, batch._meta, view, weight, weight.dtype, layer, layer.weight, calls, torch.add, "sum"]
    watched += [None, True, 1, (), Tensor, BatchTensor, nn.Parameter, torch.Size, native.Outdated]

    def rounds(number: int) -> None:
        for _ in range(number):
            func(batch, weight, **kwargs)
            func(batch, weight * 2)
            batch.transpose(0, 1)
            batch[:, 1:] + 0.5
            batch.add_(1.0, alpha=2)
            batch.split(1, 1)
            batch.sum()
            batch.topk(2, 1)
            F.dropout(batch, 0.5)
            torch.stack([batch, batch], 1)
            torch.cat([batch] * 40)  # more inputs than the engine takes
            call(layer, (batch,), {})
            call(hooked, (batch,), {})
            C.described(func, (batch, {1}), kwargs)
            with torch.inference_mode():
                batch.mul(2)
            for wrong in wrongs:
                with pytest.raises((RuntimeError, TypeError)):
                    wrong()

    def counts() -> list[int]:
        gc.collect()
        return [sys.getallocatedblocks(), *map(sys.getrefcount, watched)]

    rounds(50)
    grown = []
    for _ in range(3):  # the first rounds fill free lists
        before = counts()
        rounds(500)
        grown.append([abs(b - a) for a, b in zip(before, counts(), strict=True)])
    least = list(map(min, *grown))
    assert max(least) < 250, least  # of 500


def test_programs_are_collected_with_their_view() -> None:
    """A program refers to the view of its results, which refers to the program."""

    def work(view: View) -> None:
        batch = BatchTensor.of(torch.randn(4, 3), view)
        for _ in range(5):
            torch.cat([batch, batch * 2.0], 1).split(2, 1)
            batch.topk(2, 1)
            F.layer_norm(batch, (3,))
        assert view.programs.everything()

    C.forget()
    gc.collect()
    before = count(gc.get_objects())
    on_ranks(1, work)
    C.forget()
    gc.collect()
    assert count(gc.get_objects()) == before


def count(objects: list[Any]) -> int:
    return sum(type(one).__name__ == "Program" for one in objects)


def test_a_program_that_cannot_be_read_leaves_nothing() -> None:
    function = F.linear
    before = sys.getrefcount(function)
    constant, unfinished = (4, 1, ()), (4, None)
    for _ in range(20):
        assert C.program((5, list, ((8, function, (constant,) * 50, ()),)), 1) is None
        assert C.program((5, list, (constant,)), 1000) is None
        with pytest.raises(TypeError):
            C.program((5, list, ((8, function, (constant, unfinished), ()),)), 1)
    assert sys.getrefcount(function) == before


def test_recorded_draws_are_counted_and_those_of_one_device(chosen: str) -> None:
    """A compiled module is proven not to draw by this count."""
    x = torch.randn(7, 5)

    def draws(start: int, batch: Tensor) -> list[Tensor]:
        torch.manual_seed(start)
        out = [F.dropout(batch, p) for p in (0.1, 0.5, 0.0, 1.0, 0.1)]
        out += [F.dropout(batch.transpose(0, 1), 0.3), F.dropout(batch, 0.2, False), F.dropout(batch, 0.2)]
        return [*out, torch.rand(3)]

    def work(view: View) -> list[list[Tensor]]:
        batch = BatchTensor.of(x, view)
        draws(0, batch)
        draws(0, batch)
        before = view.drawn
        F.dropout(batch, 0.5)
        assert view.drawn == before + 1
        batch_of = [draws(start, batch) for start in (1, 2)]
        return [[out.full_tensor() if isinstance(out, BatchTensor) else out for out in outs] for outs in batch_of]

    for outs in on_ranks(2, work, Turns(2)):
        for start, found in zip((1, 2), outs, strict=True):
            for one, other in zip(found, draws(start, x), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_recorded_attention_drops_what_one_device_drops(chosen: str, dtype: torch.dtype) -> None:
    """From the second call on it is computed in steps, with masks of the whole batch; not in 16 bits."""
    n, heads, length, size = 7, 2, 5, 4
    x = torch.randn(n, length, heads * size, dtype=dtype)
    padding = torch.arange(length) >= torch.arange(2, 2 + n)[:, None]
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(heads * size, heads, dropout=0.3, add_bias_kv=True, dtype=dtype)
    layer = nn.TransformerEncoderLayer(heads * size, heads, 8, 0.2, batch_first=True, dtype=dtype)

    def drawn(batch: Tensor, padding: Tensor, start: int) -> list[Tensor]:
        torch.manual_seed(start)
        q, k = (part.view(-1, length, heads, size).transpose(1, 2) for part in (batch, batch * 2))
        few, transposed = k[:, :1], batch.transpose(0, 1)
        dot = F.scaled_dot_product_attention
        return [
            dot(q, k, k, None, 0.3),
            dot(q, k, q, dropout_p=0.3, is_causal=True, scale=-0.2),
            dot(q, few, few, dropout_p=0.3, enable_gqa=True),
            dot(q, k, k, padding[:, None, None].logical_not(), 0.5),
            *attention(transposed, transposed[1:], transposed[1:], padding[:, 1:], average_attn_weights=False),
            attention(transposed, transposed, transposed, need_weights=False)[0],
            layer(batch, src_key_padding_mask=padding),
            F.dropout(transposed, 0.3),
            torch.rand(3),
        ]

    def work(view: View) -> list[list[Tensor]]:
        batch, own_padding = BatchTensor.of(x, view), BatchTensor.of(padding, view)
        batch_of = [drawn(batch, own_padding, start) for start in range(4)]
        before = view.whole_operations.total()
        drawn(batch, own_padding, 4)
        assert view.whole_operations.total() == before
        return [list(map(gather_all, outs)) for outs in batch_of]

    for outs in on_ranks(2, work, Turns(2)):
        for start, found in enumerate(outs):
            for one, other in zip(found, drawn(x, padding, start), strict=True):
                torch.testing.assert_close(one, other)  # as products of fewer rows round differently


def test_programs_do_not_repeat_what_has_no_effect(chosen: str) -> None:
    """The rule of `transpose` asks a tensor without values for the order of dimensions."""

    def work(view: View) -> list[str]:
        batch = BatchTensor.of(torch.randn(4, 3), view)
        for _ in range(3):
            batch.transpose(0, 1)
        with torch.autograd.profiler.profile() as profile:
            batch.transpose(0, 1)
        return [event.name for event in profile.function_events]

    assert on_ranks(1, work) == [["aten::transpose", "aten::as_strided"]]


METHODS: dict[str, tuple[Any, ...]] = {
    "view": (4, -1),
    "reshape": (4, 2, 3),
    "transpose": (1, 2),
    "permute": (0, 2, 1),
    "contiguous": (),
    "flatten": (1,),
    "squeeze": (1,),
    "unsqueeze": (1,),
    "expand": (2, 4, 3, 2),
    "chunk": (2, 2),
    "unbind": (1,),
    "softmax": (-1,),
    "mean": (1,),
    "sum": (1,),
    "masked_fill": (torch.ones(2, dtype=torch.bool), 0.5),
    "add": (2,),
    "mul": (2.5,),
    "__add__": (1,),
    "__sub__": (1,),
    "__mul__": (3.5,),
    "__truediv__": (3,),
    "__matmul__": (torch.ones(2, 2),),
    "__neg__": (),
    "__getitem__": ((slice(None), 1),),
}


def test_methods_find_the_programs_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of the engine passes what torch would pass to `__torch_function__`, or it would find no program."""
    dispatched: list[Any] = []
    x = torch.randn(4, 3, 2)
    own = {name for name, value in vars(BatchTensor).items() if type(value) is type(Tensor.view)}
    assert own == set(METHODS)

    def work(view: View) -> None:
        batch, call = BatchTensor.of(x, view), native.dispatch
        monkeypatch.setattr(native, "dispatch", lambda *given: dispatched.append(given) or call(*given))
        native.use(C)
        for name, args in METHODS.items():
            for _ in range(4):
                getattr(Tensor, name)(batch, *args)
            dispatched.clear()
            found, expected = getattr(batch, name)(*args), getattr(batch.full_tensor(), name)(*args)
            assert [call[0] for call in dispatched] == []
            torch.testing.assert_close(gather_all(found), expected, rtol=0, atol=0)

    on_ranks(1, work)
    monkeypatch.undo()
    native.install()


def test_methods_leave_modes_and_other_classes_to_torch() -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"own {func.__name__}")
            return "own"

    def work(view: View) -> None:
        batch, plain = BatchTensor.of(torch.ones(4, 3), view), torch.arange(3.0)
        for _ in range(4):
            batch.view(4, 3)
        with Mode():
            batch.view(4, 3)
        with AsPlainTensors(), pytest.raises(Refused, match="without a torch function"):
            batch.view(4, 3)
        assert Own().__radd__(batch) == "own"
        torch.testing.assert_close((plain - batch).full_tensor(), plain - torch.ones(4, 3))
        with pytest.raises(TypeError):
            batch + "text"
        with pytest.raises(RuntimeError, match="12"):
            batch.view(5)

    on_ranks(1, work)
    assert seen == ["view", "own add"]


@pytest.mark.parametrize("grown", ["hook", "compiled", "whole"])
def test_modules_that_are_no_longer_ordinary(chosen: str, grown: str) -> None:
    """What is known of a class decides nothing about a module that has been given a hook since."""

    def work(view: View) -> None:
        calls, inner, seen = ModuleCalls(view), nn.Linear(3, 3), list[Any]()
        assert (native.chosen() is None) == (chosen == "python")

        def call(module: nn.Module, *args: Any) -> Any:
            return calls.call(lambda module, *args: module.forward(*args), module, args, {})

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Any:
                return call(self.inner, x)

        def is_ordinary(*args: Any) -> bool:
            seen.clear()
            calls.call(lambda *_: None, inner, args, {})
            return not seen

        outer, batch = Outer(), BatchTensor.of(torch.randn(4, 3), view)
        for _ in range(3):
            call(outer, batch)
        assert calls._ordinary[nn.Linear] is True
        calls._here.ordinary = calls._ordinary
        calls.unusual = lambda *args: seen.append(args)  # type: ignore[method-assign]
        assert is_ordinary(batch)
        if grown == "hook":
            inner.register_full_backward_hook(lambda *_: None)
            assert is_ordinary(batch) == (chosen == "python")
            inner._backward_hooks.clear()
            inner._is_full_backward_hook = None
            inner.register_backward_hook(lambda *_: None)
        elif grown == "compiled":
            inner._compiled_call_impl = lambda *_: None
        with calls.computed_whole() if grown == "whole" else nullcontext():
            assert not is_ordinary(batch)
        assert not is_ordinary(torch.randn(4, 3))
        assert not is_ordinary()

    on_ranks(1, work)


MODULES: dict[Any, Any] = {  # of `native.LEAVES`
    nn.Identity: nn.Identity,
    nn.Linear: lambda: nn.Linear(6, 6),
    nn.Embedding: lambda: nn.Embedding(9, 6, padding_idx=1, max_norm=0.5),
    nn.LayerNorm: lambda: nn.LayerNorm(6),
    nn.Dropout: lambda: nn.Dropout(0.3),
    nn.ReLU: nn.ReLU,
    nn.GELU: lambda: nn.GELU("tanh"),
    nn.SiLU: nn.SiLU,
    nn.Tanh: nn.Tanh,
    nn.Sigmoid: nn.Sigmoid,
}


def changes(module: nn.Module) -> Iterator[None]:
    """What a script may do to a module between two calls, step by step."""
    module.eval()
    yield
    module.requires_grad_(False)
    yield
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(parameter.detach() * 2))
    yield
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.detach().T.contiguous().T
    yield
    if getattr(module, "bias", None) is not None:
        module.bias = None
    for name, value in {"p": 0.7, "inplace": True, "eps": 0.1, "approximate": "none", "padding_idx": None}.items():
        if name in module.__dict__:
            setattr(module, name, value)
    yield
    hooks = [module.register_forward_pre_hook(lambda _, args: (args[0] * 1,))]
    hooks.append(module.register_forward_hook(lambda _, args, out: out + 1))
    yield
    for hook in hooks:
        hook.remove()
    hook = torch.nn.modules.module.register_module_forward_hook(lambda _, args, out: out - 1)
    yield
    hook.remove()
    module.forward = lambda x: x * 3  # type: ignore[method-assign]
    yield
    del module.forward
    for name, _ in list(module.named_parameters()):
        delattr(module, name)
        setattr(module, name, torch.full((9, 6) if isinstance(module, nn.Embedding) else (6,), 0.5))
    yield


@pytest.mark.parametrize("kind", native.LEAVES)
def test_modules_that_call_one_function(chosen: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not entered, and yet what a script changes of them counts from the next call on."""
    x = torch.randint(9, (4, 6)) if kind is nn.Embedding else torch.randn(4, 6)
    torch.manual_seed(0)
    start = MODULES[kind]()
    before = kind.forward

    def values(module: nn.Module, call: Any, batch: Any) -> Iterator[Any]:
        for place, _ in enumerate(chain([None], changes(module))):
            for number in range(4):
                torch.manual_seed(number)
                yield place, gather_all(call(module, batch * 1 if place else batch))
        monkeypatch.setattr(kind, "forward", lambda self, x: x * 5)
        yield "forward", gather_all(call(module, batch))
        monkeypatch.setattr(kind, "forward", before)

    def work(view: View) -> list[Any]:
        calls, module, batch = ModuleCalls(view), copy.deepcopy(start), BatchTensor.of(x, view)
        calls._ordinary.keep(kind, True)
        calls._here.ordinary = calls._ordinary
        call = partial(calls.call, nn.Module.__call__)
        return list(values(module, lambda module, batch: call(module, (batch,), {}), batch))

    expected = list(values(copy.deepcopy(start), nn.Module.__call__, x))
    (found,) = on_ranks(1, work)
    for (place, one), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(one, other), place
