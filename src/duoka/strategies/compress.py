"""Ways to sum gradients over ranks, compressed or not, by name in `COMPRESSIONS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial

import torch
from torch import Tensor

from duoka.collectives.base import Collectives
from duoka.errors import OptionError

# Begins to sum a bucket over ranks, in place: (bucket, numbers of its gradients, their shapes, ranks). The function
# that it returns waits for the result.
Compression = Callable[[Tensor, Sequence[int], Sequence[torch.Size], Collectives], Callable[[], None]]


def uncompressed(
    flat: Tensor, members: Sequence[int], shapes: Sequence[torch.Size], ranks: Collectives
) -> Callable[[], None]:
    """Sum the gradients as they are."""
    return ranks.start_all_reduce(flat)


def in_16_bits(
    dtype: torch.dtype, flat: Tensor, members: Sequence[int], shapes: Sequence[torch.Size], ranks: Collectives
) -> Callable[[], None]:
    """Round float32 gradients; others are summed as they are."""
    if flat.dtype != torch.float32:
        return ranks.start_all_reduce(flat)
    sent = flat.to(dtype)
    wait_for_sent = ranks.start_all_reduce(sent)

    def wait() -> None:
        wait_for_sent()
        flat.copy_(sent)

    return wait


class PowerSgd:
    """Low-rank approximations of gradients (Vogels, Karimireddy & Jaggi, "PowerSGD", NeurIPS 2019).

    Each rank adds its approximation error to its next gradient. The first `after` gradients of a parameter are not
    compressed, as with torch's powerSGD_hook.
    """

    def __init__(self, rank: int = 1, after: int = 1000) -> None:
        self._rank, self._after = rank, after
        self._times: dict[int, int] = {}
        self._lost: dict[int, Tensor] = {}
        self._right: dict[int, Tensor] = {}  # the last right factor, the next starting point

    def __call__(
        self, flat: Tensor, members: Sequence[int], shapes: Sequence[torch.Size], ranks: Collectives
    ) -> Callable[[], None]:
        """Sum left factors of matrices, and uncompressed gradients, now; right factors when waited for."""
        parts = flat.split([shape.numel() for shape in shapes])
        matrices = {
            member: part.view(shape[0], -1)
            for member, part, shape in zip(members, parts, shapes, strict=True)
            if self._is_worth_it(member, shape, flat.dtype)
        }
        if not matrices:
            return ranks.start_all_reduce(flat)
        for member, matrix in matrices.items():
            matrix += self._lost.get(member, 0)
        lefts = [matrix @ self._right_of(member, matrix) for member, matrix in matrices.items()]
        others = [part for member, part in zip(members, parts, strict=True) if member not in matrices]
        sent = torch.cat([*(left.flatten() for left in lefts), *others])
        wait_for_sent = ranks.start_all_reduce(sent)

        def wait() -> None:
            wait_for_sent()
            sums = sent.split([*(left.numel() for left in lefts), *(part.numel() for part in others)])
            for part, total in zip(others, sums[len(lefts) :], strict=True):
                part.copy_(total)
            summed = [total.view_as(left) for total, left in zip(sums, lefts, strict=False)]
            self._finish(matrices, summed, ranks)

        return wait

    def _is_worth_it(self, member: int, shape: torch.Size, dtype: torch.dtype) -> bool:
        self._times[member] = self._times.get(member, 0) + 1
        if self._times[member] <= self._after or dtype != torch.float32 or len(shape) < 2:
            return False
        rows, columns = shape[0], shape[1:].numel()
        return (rows + columns) * self._rank < rows * columns

    def _right_of(self, member: int, matrix: Tensor) -> Tensor:
        if member not in self._right:
            same = torch.Generator().manual_seed(member)  # on all ranks
            self._right[member] = torch.randn(matrix.shape[1], self._rank, generator=same).to(matrix.device)
        return self._right[member]

    def _finish(self, matrices: dict[int, Tensor], lefts: list[Tensor], ranks: Collectives) -> None:
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        sent = ranks.all_reduce(torch.cat([right.flatten() for right in rights]))
        summed = sent.split([right.numel() for right in rights])
        for (member, matrix), left, right, total in zip(matrices.items(), lefts, rights, summed, strict=True):
            right = total.view_as(right)
            approximated = left @ right.t()
            # An infinite or NaN error must not be added to all later gradients.
            self._lost[member] = (matrix - approximated / ranks.world_size).nan_to_num_(0, 0, 0)
            self._right[member] = torch.where(right.isfinite().all(), right, self._right[member])
            matrix.copy_(approximated)


COMPRESSIONS: dict[str, Callable[..., Compression]] = {
    "none": lambda: uncompressed,
    "bf16": lambda: partial(in_16_bits, torch.bfloat16),
    "fp16": lambda: partial(in_16_bits, torch.float16),
    "powersgd": PowerSgd,
}


def compression(word: str) -> Compression:
    """Return the method named by `compress=word`: none, bf16, fp16, or powersgd[:RANK[:AFTER]].

    Raises:
        OptionError: there is no such method.
    """
    name, *numbers = str(word).split(":")
    if name in COMPRESSIONS and not numbers:
        return COMPRESSIONS[name]()
    if name == "powersgd" and len(numbers) <= 2 and all(number.isdecimal() for number in numbers) and int(numbers[0]):
        return PowerSgd(*map(int, numbers))
    close = get_close_matches(name, COMPRESSIONS, n=1)
    hint = f"did you mean {close[0]}?" if close and not numbers else "a rank of 2, after 10 passes: powersgd:2:10"
    raise OptionError("compress", word, f"one of {', '.join(COMPRESSIONS)}", hint)
