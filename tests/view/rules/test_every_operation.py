"""torch's own samples of all its operations: right, or refused; and every rule is run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from duoka.errors import Refused
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import in_turns, shared, whole_of
from tests.view.rules.operations import cases, difference
from tests.view.rules.test_against_torch import REDUCED, SHARED, WHOLE, _inputs
from tests.view.rules.test_layers import LAYERS, layer_inputs
from tests.view.rules.uses import OWN, USES


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
    noted = {rule: noting(rule) for rule in BatchTensor.rules.values()}
    monkeypatch.setattr(BatchTensor, "rules", {func: noted[rule] for func, rule in BatchTensor.rules.items()})
    monkeypatch.setattr(BatchTensor, "traits", {noted[rule]: of for rule, of in BatchTensor.traits.items()})
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


@pytest.mark.timeout(1500)  # threads in turn: 15 s on an idle machine, 300 s and more on a busy one
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
    unused = sorted(str(name) for name in never if name is None or name.rpartition(".")[2] not in OWN.split())
    assert not unused, " ".join(unused)


def _ways_wrong(view: View, func: Any, used: set[Any]) -> list[str]:
    """What a function says of a batch that it does not say of a plain tensor."""
    name = getattr(func, "__name__", "")
    for space in ("special_", "linalg_", "fft_"):
        name = name.removeprefix(space)
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
