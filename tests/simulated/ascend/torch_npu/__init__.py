"""Simulated: what Huawei's extension gives torch, which imports it by its entry point."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed

cards: Any = sys.modules["simulated_cards_in_python"]


def _autoload() -> None:
    """The entry point; importing this module has done all."""


torch.utils.rename_privateuse1_backend(cards.WORD)
cards.before_cuda()
import torch.npu as npu  # noqa: E402 - a copy of torch.cuda's code; see cards.py

npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
cards.after_cuda(npu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
cards.register_hccl()
