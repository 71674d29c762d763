"""`run.model(strategy="dp")`: the devices of this process on which a model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from duoka.errors import MISSING, DeviceError, OptionError
from duoka.options import one_of
from duoka.picking import Picked
from duoka.picking import devices as pick_devices
from duoka.plain import constructors, modules, norm, transforms
from duoka.plan import STRATEGIES
from duoka.run.api_session import ApiSession
from duoka.run.calls import ApiCalls
from duoka.strategies import Dp
from duoka.view.support.kinds import is_compiled
from duoka.view.view import View

Devices = int | str | Sequence[int | str | torch.device]


def check_strategy(asked: str, world_size: int, devices: object) -> None:
    """Check that a strategy is possible in this run.

    Raises:
        OptionError: it is not.
    """
    one_of("strategy", asked, STRATEGIES)
    if asked == "dp" and world_size > 1:
        hint = "each of several ranks has one device, and strategy='auto' keeps them in step"
        raise OptionError("strategy", "dp", "used in a run of one process", hint)
    if asked == "single" and world_size > 1:
        raise OptionError("strategy", "single", f"auto or ddp for {world_size} ranks")
    if asked != "dp" and devices is not None:
        hint = "a rank has one device, which duoka.start(device=...) chooses"
        raise OptionError("devices", devices, "given with strategy='dp' only", hint)


def pick(asked: Devices | None, here: torch.device) -> Picked:
    """Pick the devices of a model. asked: their number, a text as for `--devices`, or a list; None: all GPUs.

    Raises:
        OptionError: they are not of one type.
        DeviceError: one does not exist.
    """
    if asked is None:
        if here.type == "cpu":
            raise OptionError("devices", MISSING, "given on a machine without a GPU", "for example: devices='cpu:2'")
        asked = range(torch.cuda.device_count())
    if isinstance(asked, bool) or (isinstance(asked, int) and asked < 1):
        raise OptionError("devices", asked, "how many devices, at least 1, or which")
    if isinstance(asked, int):
        asked = f"cpu:{asked}" if here.type == "cpu" else str(asked)
    picked = pick_devices(asked) if isinstance(asked, str) else Picked(map(_device, asked))
    kinds = sorted({device.type for device in picked})
    if len(kinds) != 1:
        raise OptionError("devices", asked, "devices of one kind", f"these are {' and '.join(kinds) or 'none'}")
    return picked


def _device(asked: int | str | torch.device) -> torch.device:
    """Return a device of a list; a number is a GPU's, as for nn.DataParallel."""
    try:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):
        raise OptionError("devices", asked, "cpu, or a GPU's number as torch has it (0, 'cuda:1')") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DeviceError(f"devices: {device} is not there: torch finds {count} cuda devices")
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu") if device.type == "cpu" else device


class DevicePlacement:
    """Chooses the devices on which the models of a run compute. here: the device of this rank."""

    def __init__(self, session: ApiSession, here: torch.device, timeout: float) -> None:
        self._session, self._here, self._timeout = session, here, timeout
        self._picked: list[Picked] = []
        self._made: Dp | None = None

    def devices(self, strategy: str, asked: Devices | None) -> Sequence[torch.device]:
        """Return the devices of a model: several with the strategy dp, else this rank's.

        Raises:
            OptionError, DeviceError: as by `pick`.
        """
        if strategy != "dp":
            return [self._here]
        picked = pick(asked, self._here)
        self._picked.append(picked)
        return picked

    def share_out(self, module: nn.Module, devices: Sequence[torch.device], output_device: Any, dim: Any) -> None:
        """Let `module` compute on these devices.

        Raises:
            OptionError: it cannot.
        """
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
            raise OptionError("dim", dim, "the dimension of the samples in the model's inputs, 0 or more")
        output = devices[0] if output_device is None else _device(output_device)
        if output not in tuple(devices):
            allowed = ", ".join(map(str, dict.fromkeys(devices)))
            raise OptionError("output_device", output_device, f"one of {allowed}")
        if any(map(is_compiled, module.modules())):
            raise OptionError("strategy", "dp", "used for a model that is not compiled", "ranks may compile it")
        if len(devices) > 1:
            self._dp().share_out(module, devices, output, dim)

    def with_loss(self, model: nn.Module, loss: Any) -> ModelWithLoss:
        """Return a module that computes the model and the loss on each of the model's devices."""
        both = ModelWithLoss(model, loss)
        if self._made is not None:
            self._made.share_out_as(model, both)
        return both

    def close(self) -> None:
        """Release the devices."""
        for picked in self._picked:
            picked.release()

    def _dp(self) -> Dp:
        """Return the strategy dp; install its interceptions for the first model that uses it."""
        if self._made is None:
            self._made = Dp(self._install, self._session.say)
        return self._made

    def _install(self, view: View) -> None:
        """Install interceptions for forward passes on batches of these devices."""
        session = replace(self._session, view=view, calls=ApiCalls(view, self._session.calls.local_stream))
        for interception in (modules, norm, constructors, transforms):
            interception.install(session)
        session.patches.reach()


class ModelWithLoss(nn.Module):
    """A model followed by its loss function: gives the loss of each sample, on the device of its output."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Any, **how: Any) -> torch.Tensor:
        """Return loss(model(*inputs), target), shape (n,) or more; the last of `inputs` is the target."""
        *inputs_of_model, target = inputs
        losses: torch.Tensor = self.loss(self.model(*inputs_of_model, **how), target)
        if losses.dim() == 0:
            hint = "reduction='none', and take the mean of its result"
            raise OptionError("run.loss", "a loss of all samples together", "given one with a value for each", hint)
        return losses
