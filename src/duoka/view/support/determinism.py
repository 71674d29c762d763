"""What torch has to be told so that the same operation gives the same bits each time."""

from __future__ import annotations

import torch

from duoka import environment


def be_deterministic() -> None:
    """From now on each operation gives the same bits each time; one that cannot raises, and torch names it."""
    environment.fix_cublas_workspace()  # before the first use of a GPU
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, mends nothing
    # Not by attributes: these may be frozen (torch.backends.disable_global_flags).
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True, _fp32_precision=None)
