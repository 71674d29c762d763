"""Apple: the GPU of a Mac, which shares the processor's memory. There is one, and nothing hides it."""

from __future__ import annotations

import os
import platform

from duoka.hardware.gpu import Gpu
from duoka.hardware.vendors.report import Report

TYPE, TOOL, IS_SORTED = "mps", "duoka gpus", False
IN_AUTO = False  # it has no float64, and `--devices 2` means two CPU workers on a Mac
VISIBLE: tuple[str, ...] = ()
ORDER: dict[str, str] = {}
FAULT, ABSENT = "command buffer exited with error", "MPS backend is (?:not|only) supported"


def ask() -> Report:
    """Return the GPU, if this is a Mac with one that torch can use."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return Report()
    return Report((Gpu(0, "", "Apple GPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),))
