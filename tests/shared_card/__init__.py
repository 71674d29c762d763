"""One real GPU as several, with NCCL between them: for a machine that has one.

    .venv/bin/python -m tests.shared_card 4 duoka run --devices 0,1 train.py
    .venv/bin/python -m tests.shared_card 4 pytest -m "cards or cpu_and_cards" --real-cards tests/flows

A process with these variables has 4 cards, in the driver (`site/sitecustomize.py`) and in CUDA's runtime (`card.c`);
all are the machine's first GPU. What this cannot show: speed, as ranks wait for each other's time on the GPU and for
sockets; cards of different kinds; their memory, which they share; NVLink, and peers' memory.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def variables(cards: int) -> dict[str, str]:
    """The variables of a process that sees one GPU as several; compiles what it needs for that."""
    folder = Path(tempfile.gettempdir()) / f"duoka-shared-card-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    library, made = folder / "card.so", folder / f"card-{os.getpid()}.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", HERE / "card.c", "-o", made, "-ldl"], check=True)
    made.replace(library)
    return {
        "SHARED_CARD": str(cards),
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "NCCL_SOCKET_IFNAME": "lo",
    }
