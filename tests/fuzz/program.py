"""Small training scripts as lists of statements, and what one run of such a script has printed."""

from __future__ import annotations

import gc
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

FILE = "/tmp/program.py"  # a file of the user's; it need not exist
DEVICE = os.environ.get("FUZZ_DEVICE", "cpu")  # on which programs make their tensors: cuda on a machine with a GPU
IMPORTS = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
IMPORTS += "from torch.utils.data import DataLoader, TensorDataset\n"
_EITHER = re.compile(r"^(.*?= )?(.+) if step % 2 else (.+)$", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A script: statements before the loop, the loop's head, and statements in it and after it.

    Where a statement raises, the script prints the error's type and goes on with the next statement.
    """

    header: tuple[str, ...]
    loop: str
    body: tuple[str, ...]
    end: tuple[str, ...] = ()

    def source(self, guarded: Callable[[str], bool] = lambda statement: True) -> tuple[str, str]:
        """Return the script in two parts: header, and loop. guarded: whether a statement is in a `try`."""

        def guard(statement: str) -> str:
            if not guarded(statement):
                return statement
            inner = textwrap.indent(statement, "    ")
            return f"try:\n{inner}\nexcept Exception as error:\n    print(type(error).__name__)"

        body = textwrap.indent("\n".join(map(guard, self.body)) or "pass", "    ")
        parts = [f"{self.loop}\n{body}", *map(guard, self.end)]
        return IMPORTS + "\n".join(self.header) + "\n", "\n".join(parts) + "\n"

    def in_other_precision(self) -> Program | None:
        """Return the program with float64 for float32, or the reverse; None if it uses both, or neither."""
        text = "".join(self.source())
        if ("float32" in text) == ("float64" in text):
            return None
        names = ("float32", "float64") if "float32" in text else ("float64", "float32")
        header, body, end = (
            tuple(one.replace(*names) for one in part) for part in (self.header, self.body, self.end)
        )
        return Program(header, self.loop, body, end)

    def smaller(self) -> Iterator[Program]:
        """Yield programs that lack statements, or have a simpler one, the smallest first."""
        for name in ("body", "header", "end"):
            statements = getattr(self, name)
            size = len(statements)
            length = size
            while length:
                for start in range(0, size, length):
                    yield replace(self, **{name: statements[:start] + statements[start + length :]})
                length //= 2
        for name in ("body", "header", "end"):
            statements = getattr(self, name)
            for place, statement in enumerate(statements):
                if found := _EITHER.match(statement):
                    for side in (3, 2):
                        simple = (found[1] or "") + found[side]
                        yield replace(self, **{name: (*statements[:place], simple, *statements[place + 1 :])})


@dataclass(frozen=True)
class Event:
    """One `print`: its line, the plain values of its arguments, and the text of the error being handled."""

    line: int
    values: Any
    text: str = ""


@dataclass(frozen=True)
class Played:
    """A run of a program. error: the type of what ended it early, and its text."""

    events: tuple[Event, ...]
    error: tuple[str, str] | None = None


def play(program: Program, prepare: Callable[[dict[str, Any]], None] = lambda space: None) -> Played:
    """Run a program in this process as its main module. prepare: is called with its names before the loop."""
    events: list[Event] = []

    def record(*values: Any) -> None:
        error = sys.exc_info()[1]
        events.append(Event(sys._getframe(1).f_lineno, _plain(values), "" if error is None else str(error)[:400]))

    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": FILE, "print": record})
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    dtype, collects = torch.get_default_dtype(), gc.isenabled()
    header, rest = program.source()
    try:
        with warnings.catch_warnings(), _on_device():
            warnings.simplefilter("ignore")
            exec(compile(header, FILE, "exec", dont_inherit=True), main.__dict__)
            prepare(main.__dict__)
            lines = "\n" * header.count("\n")
            exec(compile(lines + rest, FILE, "exec", dont_inherit=True), main.__dict__)
    except Exception as error:
        return Played(tuple(events), (type(error).__name__, str(error)[:1000]))
    finally:
        sys.modules["__main__"] = before
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        (gc.enable if collects else gc.disable)()
    return Played(tuple(events))


def _on_device() -> AbstractContextManager[Any]:
    """Return a context in which functions of torch make tensors on the device, but for what loaders draw."""
    if DEVICE == "cpu":
        return nullcontext()
    made = torch.utils._device._device_constructors()  # type: ignore[attr-defined]
    made.difference_update([one for one in made if one.__name__ == "randperm"])  # of loaders that shuffle
    torch.backends.cudnn.allow_tf32 = False
    return torch.device(DEVICE)


def _plain(value: Any) -> Any:
    if type(value) is Tensor and value._is_zerotensor():  # of a second gradient: it has no memory to read
        return _plain(torch.zeros(value.shape, dtype=value.dtype))
    if isinstance(value, Tensor):
        return _plain(value.detach().tolist())
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return str(value)


def nudge(seed: int) -> Callable[[dict[str, Any]], None]:
    """Return a function that moves each number of a program's tensors and modules by a unit in the last place."""

    def apply(space: dict[str, Any]) -> None:
        random = torch.Generator().manual_seed(seed)
        tensors = [value for value in space.values() if isinstance(value, Tensor)]
        for module in [value for value in space.values() if isinstance(value, nn.Module)]:
            tensors += module.state_dict(keep_vars=True).values()
        # Through `data`, as programs print how many writes torch has counted.
        for tensor in {id(one): one.data for one in tensors if one.is_floating_point()}.values():
            drawn = torch.rand(tensor.shape, generator=random, device="cpu")
            towards = torch.where(drawn < 0.5, -torch.inf, torch.inf).to(tensor)
            tensor.copy_(torch.where(tensor == 0, tensor, torch.nextafter(tensor, towards)))

    return apply
