"""`run.model(strategy="fsdp")`: models too large for one device, a part on each rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from duoka.errors import OptionError
from duoka.private.torch import without_gloo_messages
from duoka.process import this_process
from duoka.run import sharded_tensors
from duoka.run.api_session import ApiSession
from duoka.run.models import move
from duoka.run.precision import DTYPES
from duoka.strategies.fully_shard import FullyShard
from duoka.view.support.kinds import is_compiled

_ALLOWED = {"precision": ("32", "bf16")}
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class Sharding:
    """The sharded models of a run. device: this rank's. timeout: seconds that a collective may wait."""

    def __init__(self, session: ApiSession, device: torch.device, timeout: float) -> None:
        self._session, self._device, self._timeout = session, device, timeout
        self._made: FullyShard | None = None

    def sharding(self, given: dict[str, Any]) -> Callable[[nn.Module], None]:
        """Return a function that shards a module over all ranks; with one rank it only moves it.

        given: options of `run.model`.

        Raises:
            OptionError: an option is not allowed; or, when called, the module cannot be sharded.
        """
        for name, value in given.items():
            if value not in _ALLOWED.get(name, (False,)):
                hint = "bf16 is allowed" if name == "precision" else ""
                raise OptionError(name, value, "left out with strategy='fsdp'", hint)
        compress = self._session.plan.compress
        if compress != "none":
            hint = f"duoka.start was given compress={compress!r}"
            raise OptionError("strategy", "fsdp", "used where gradients are not compressed", hint)
        dtype = DTYPES[given["precision"]]
        return partial(self._shard, dtype=None if dtype == torch.float32 else dtype)

    def _shard(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        if any(map(is_compiled, module.modules())):
            raise OptionError("strategy", "fsdp", "used for a model that is not compiled")
        if self._session.ranks.world_size == 1:
            move(module, self._device)
        else:
            self._fsdp().shard(module, dtype)

    def close(self) -> None:
        """Undo interceptions. torch's process group stays, so that sharded tensors can still be saved."""
        if self._made is not None:
            self._made.close()

    def _fsdp(self) -> FullyShard:
        """Return the strategy; install its interceptions for the first model that uses it."""
        if self._made is None:
            session = self._session
            self._made = FullyShard(session.ranks, self._mesh(), self._device, session.strategy.leave, session.say)
            sharded_tensors.install(session.patches, session.ranks)
        return self._made

    def _mesh(self) -> Any:
        """Return all ranks as a mesh for torch's fully_shard, over the script's process group, if it has one."""
        from torch.distributed.device_mesh import DeviceMesh

        distributed, ranks = torch.distributed, self._session.ranks
        if not distributed.is_initialized():
            communication = this_process().communication
            assert communication is not None
            with without_gloo_messages():
                distributed.init_process_group(
                    _BACKENDS[self._device.type],
                    store=PrefixStore("sharding", communication.store),
                    rank=ranks.rank,
                    world_size=ranks.world_size,
                    timeout=timedelta(seconds=self._timeout),
                )
        elif (distributed.get_rank(), distributed.get_world_size()) != (ranks.rank, ranks.world_size):
            given = f"rank {distributed.get_rank()} of {distributed.get_world_size()}"
            raise OptionError("torch.distributed's default group", given, "the ranks of the run, in their order")
        group = distributed.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, self._device.type)
