"""Started by an engine (torchrun, mpirun, srun, ...), which tells each process its rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from duoka import engines
from duoka.engines import Part
from duoka.errors import MISSING, OptionError
from duoka.origins.base import Origin, tcp_store


@dataclass(frozen=True)
class Started(Origin):
    """One of the processes that an engine has started. part: what it tells this one."""

    part: Part

    @classmethod
    def found(cls) -> Started | None:
        part = engines.found()
        return None if part is None else cls(part.rank, part.count, part.local.rank if part.local else 0, part)

    def store(self, timeout: float) -> Store:
        part = self.part
        if not part.host or not part.port:
            hint = f"{part.engine} does not tell them; for example: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {part.count} ranks", hint)
        store = tcp_store(part.rank, part.host, part.port, timeout, is_master=part.rank == 0 and not part.store)
        # A prefix of its own for each attempt: dead ranks' addresses are still in an engine's own store.
        return PrefixStore(f"duoka/attempt{part.attempt}", store)
