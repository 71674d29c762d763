"""The methods of classes that are written in C, to be set like attributes."""

from __future__ import annotations

import ctypes
import gc
from typing import Any


class Methods:
    """Those of `kind`, in the class itself: a class in its place would not be the one that its instances are of."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind

    def __getattr__(self, name: str) -> Any:
        return self.kind.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        (methods,) = gc.get_referents(self.kind.__dict__)
        methods[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self.kind))
