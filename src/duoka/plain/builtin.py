"""Set methods of classes written in C."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


class Methods:
    """The methods of `kind`, set in the class itself: its instances would not use those of a replacement class."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        return self.kind.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        (methods,) = gc.get_referents(self.kind.__dict__)
        methods[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self.kind))
