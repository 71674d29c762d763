"""Started by torchrun, or by anything else that sets its variables (`duoka run --kind distributed`, Kubernetes)."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from duoka import environment
from duoka.errors import MISSING, OptionError
from duoka.origins.base import Origin, tcp_store


@dataclass(frozen=True)
class Torchrun(Origin):
    """attempt: how often torchrun has started its workers again. in_agent: the store is in torchrun's own process."""

    attempt: int
    in_agent: bool

    @classmethod
    def found(cls) -> Torchrun | None:
        rank, world_size = environment.number("RANK"), environment.number("WORLD_SIZE")
        if rank is None or world_size is None:
            return None
        local_rank = environment.number("LOCAL_RANK")
        if world_size > 1 and local_rank is None:
            raise OptionError("LOCAL_RANK", MISSING, "set where RANK and WORLD_SIZE are", "torchrun sets all of them")
        return cls(
            rank,
            world_size,
            local_rank or 0,
            environment.number("TORCHELASTIC_RESTART_COUNT") or 0,
            environment.variable("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def store(self, timeout: float) -> Store:
        place = environment.master()
        if place is None:
            hint = "torchrun sets both of them"
            raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {self.world_size} ranks", hint)
        is_master = self.rank == 0 and not self.in_agent
        # A prefix of its own for each attempt: dead ranks' addresses are still in the agent's store.
        return PrefixStore(f"duoka/attempt{self.attempt}", tcp_store(self.rank, *place, timeout, is_master))
