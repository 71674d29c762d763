"""Deterministic algorithms, for `--strategy exact`."""

from __future__ import annotations

import torch

from duoka.system import environment


def be_deterministic(device: torch.device) -> None:
    """Let each operation give the same bits each time; torch raises an error for one that cannot.

    On CPUs all can: torch names `put_`, whose bits depend on the number of threads alone, which exact keeps the same.
    """
    environment.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first use of a GPU
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time
    # The attributes may be frozen (torch.backends.disable_global_flags).
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True, _fp32_precision=None)
