"""Attention whose kernel draws dropout: on ranks that of one device, by the offset of a GPU's generator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from duoka.view.rules import kernel_draws
from duoka.view.shares.partition import Partition
from duoka.view.tensor.spec import Spec

NOT_THOSE = "not the numbers of one device"
EFFICIENT, FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"


class GpuGenerator:
    """A seed, and an offset into the numbers that follow from it."""

    def __init__(self) -> None:
        self.seed, self.offset = 7, 20
        self.device = torch.device("cpu")

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def get_state(self) -> Tensor:
        return torch.tensor([self.seed, self.offset])

    def set_state(self, state: Tensor) -> None:
        self.seed, self.offset = state.tolist()

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0


class Kernel:
    """As torch's kernels: the numbers of a sample and head follow from where they are in the batch.

    late: by how much too far its generator gets. backwards: the last sample takes the first numbers.
    """

    def __init__(self, name: str, generator: GpuGenerator, late: int = 0, backwards: bool = False) -> None:
        self.overloadpacket = SimpleNamespace(__name__=name)
        arguments = ["query", "key", "value", *["attn_bias", "compute_log_sumexp"] * (name == EFFICIENT), "dropout_p"]
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=argument) for argument in arguments])
        self._generator, self._late, self._backwards = generator, late, backwards
        self._more = 2 if name == EFFICIENT else 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, ...]:
        n, heads, length, _ = query.shape
        of_head = 32 if self._more == 0 else length * key.shape[2]
        assert more[self._more] == 0.5
        masks = []
        for place in reversed(range(n * heads)) if self._backwards else range(n * heads):
            seed = self._generator.seed * 1000003 + self._generator.offset + place * of_head
            masks.append(torch.rand(length, key.shape[2], generator=torch.Generator().manual_seed(seed)) < 0.5)
        self._generator.offset += -(-n * heads * of_head // 4) * 4 + self._late
        weights = (query @ key.mT).softmax(-1) * torch.stack(masks).view(n, heads, length, -1)
        return weights @ value, torch.empty(0)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuGenerator]:
    made = GpuGenerator()
    monkeypatch.setattr(kernel_draws, "_generator_of", lambda device: made)
    yield made
    kernel_draws._is_as_known.cache_clear()


def on_ranks(kernel: Kernel, generator: GpuGenerator, inputs: list[Tensor]) -> tuple[list[Tensor], list[str]]:
    """The results of three ranks, each of which begins with the same generator; and what they say."""
    said: list[str] = []
    view: Any = SimpleNamespace(say=said.append)
    state, outs, after = generator.get_state(), [], []
    more = (None, False, 0.5) if kernel._more else (0.5,)
    for rank in range(3):
        generator.set_state(state)
        spec = Spec(view, Partition(len(inputs[0]), rank, 3))
        rows = [spec.partition.local_rows(tensor, 0) for tensor in inputs]
        outs.append(kernel_draws.drawn_inside(kernel, (*rows, *more), {}, spec)[0])
        after.append(generator.get_state().tolist())
    assert after == [after[0]] * 3
    return outs, said


@pytest.mark.parametrize("name", [EFFICIENT, FLASH])
@pytest.mark.parametrize("samples", [3, 5, 8])
def test_ranks_drop_what_one_device_drops(name: str, samples: int, generator: GpuGenerator) -> None:
    kernel = Kernel(name, generator)
    inputs = [torch.randn(samples, 2, length, 16) for length in (6, 10, 10)]
    more = (None, False, 0.5) if name == EFFICIENT else (0.5,)
    state = generator.get_state()
    expected = kernel(*inputs, *more)[0]
    after = generator.get_state().tolist()
    generator.set_state(state)
    outs, said = on_ranks(kernel, generator, inputs)
    assert torch.equal(torch.cat(outs), expected)
    assert generator.get_state().tolist() == after
    assert said == []


@pytest.mark.parametrize("how", ["another order", "another number of draws", "between numbers"])
def test_what_is_not_known_is_told(how: str, generator: GpuGenerator) -> None:
    """The offset of a GPU's generator is a multiple of 4: three heads of 3 to 3 entries take 27 numbers."""
    kernel = Kernel(
        EFFICIENT, generator, late=4 * (how == "another number of draws"), backwards=how == "another order"
    )
    heads = 3 if how == "between numbers" else 2
    _, said = on_ranks(kernel, generator, [torch.randn(6, heads, length, 16) for length in (3, heads, heads)])
    assert said == [f"{EFFICIENT[1:]} draws dropout in its kernel, on each rank for its rows: {NOT_THOSE}"] * 3
