"""Compute each batch on several devices in one process, like nn.DataParallel.

The inputs of a model become batches of which this process holds all shares, one on each device. The forward pass runs
once, each torch function for every share, and outputs are gathered on one device. Results are those of one device:
random numbers, BatchNorm's statistics, everything that depends on all rows.

Operations on GPUs are asynchronous, so the shares are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duoka.private.torch import tree_flatten, tree_map_only, tree_unflatten
from duoka.strategies.single import Single
from duoka.view.modules.calls import holds
from duoka.view.modules.replaced_forward import ReplacedForward
from duoka.view.tensor.batch import BatchTensor, batches_in
from duoka.view.tensor.contents import Contents
from duoka.view.view import View, device_view


class Dp(Single):
    """Models of one process on several devices.

    install: installs interceptions for the view of each group of devices. say: prints a line.
    """

    def __init__(self, install: Callable[[View], None], say: Callable[[str], None]) -> None:
        self._install, self._say = install, say
        self._views: dict[tuple[torch.device, ...], View] = {}

    def share_out(self, module: nn.Module, devices: Sequence[torch.device], output: torch.device, dim: int) -> None:
        """Let `module` compute on all of `devices`; its parameters stay on the first.

        output: the device of its outputs. dim: the dimension of samples in its inputs.
        """
        key = (output, *devices)
        if key not in self._views:
            self._views[key] = device_view(devices, output, self._say)
            self._install(self._views[key])
        _MultiDeviceForward(module, self._views[key], dim)

    def share_out_as(self, module: nn.Module, other: nn.Module) -> None:
        """Let `other` compute on the devices of `module`, if there are several."""
        now = module.__dict__.get("forward")
        while isinstance(now, ReplacedForward) and not isinstance(now, _MultiDeviceForward):
            now = now.before
        if isinstance(now, _MultiDeviceForward):
            _MultiDeviceForward(other, now.view, now.dim)


class _MultiDeviceForward(ReplacedForward):
    """Replaces a model's forward pass by one that splits each batch over several devices."""

    def __init__(self, module: nn.Module, view: View, dim: int) -> None:
        super().__init__(module)
        self.view, self.dim = view, dim

    def __reduce__(self) -> Any:
        """Pickle as the forward pass on one device, for copies of the model."""
        return _plain_stand_in, (self.module, self.before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if batches_in((args, kwargs)):  # inside another such model
            return self.original(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        lead = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > self.dim), None)
        first, output = self.view.siblings[0].device, self.view.shares.combine_device
        if lead is None or not self.view.splits(lead.shape[self.dim]):
            args, kwargs = tree_map_only(Tensor, lambda leaf: leaf.to(first), (args, kwargs))
            return tree_map_only(Tensor, lambda leaf: leaf.to(output), self.original(*args, **kwargs))
        n = lead.shape[self.dim]

        def share(leaf: Any) -> Any:
            if leaf is lead or holds(leaf, n, self.dim):
                return BatchTensor.of(leaf, self.view, self.dim)
            return leaf

        args, kwargs = tree_unflatten(list(map(share, leaves)), tree)
        before = self.view.whole_operations.total()
        out = Contents(self.original(*args, **kwargs))
        if not batches_in(out.leaves) and self.view.whole_operations.total() > before:
            operation, line = next(reversed(self.view.whole_operations))
            name = type(self.module).__name__
            self._say(f"{name} at {line}: {operation} needs all rows, and is computed on {output}")
        return out.put([_whole(leaf, output) for leaf in out.leaves])

    def _say(self, line: str) -> None:
        self.view.say(line)


def _plain_stand_in(module: nn.Module, before: Any) -> ReplacedForward:
    plain = ReplacedForward.__new__(ReplacedForward)
    plain.module, plain.before = module, before
    return plain


def _whole(leaf: Any, output: torch.device | None) -> Any:
    if isinstance(leaf, BatchTensor):
        leaf = leaf.full_tensor()
    return leaf.to(output) if isinstance(leaf, Tensor) else leaf
