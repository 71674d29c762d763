"""Programs that ranks once ran otherwise than one device, crossed: the statements of two meet in one loop.

Each was mended alone; a fault is left where one mechanism meets another.
"""

from __future__ import annotations

import re
from dataclasses import replace
from zlib import crc32

from tests.fuzz.draws import Draws
from tests.fuzz.known import HELD_ROWS, LAYOUTS, OTHERS, SHARDED
from tests.fuzz.program import Program

_APART = (  # differ for other reasons when another program has drawn numbers, failed or written before them
    *("register_hook(print)", "torch.save(", "data_ptr() -", "untyped_storage().data_ptr()"),
    "net.weight.data = torch.ones(4, 3)",  # which torch refuses as long as a graph of the other shape lives
    *("x.grad = x.detach().t()", ".grad.data = torch.ones", "y.backward(torch.ones(shape))"),
)
_DATA = re.compile(r"data = \(torch\.arange\(.*\.view\(([^)]*)\)")
_NEW_X = ("x = x * 1", "x = x.clone()", "x = x[:, :]", "x = x.flip(0)", "x = x[1:]", "x = x.double()")
_ORDERED = "x = x.transpose(0, -1).contiguous().transpose(0, -1)"


def _dimensions(program: Program) -> int | None:
    """Return the number of dimensions of a program's batches; None for one that cannot be crossed."""
    data = _DATA.match(program.header[0]) if program.header else None
    if data is None or any(part in line for part in _APART for line in program.body):
        return None
    return data[1].count(",") + 1


_ALL = {name: each for name, each in (LAYOUTS | HELD_ROWS | OTHERS | SHARDED).items() if _dimensions(each)}


def _pick(draws: Draws, programs: dict[str, Program]) -> Program:
    """Return one of these programs; nearly always the same one after others were added."""
    number = draws.number(0, 2**32)
    return programs[min(programs, key=lambda name: crc32(f"{number} {name}".encode()))]


def crossed(draws: Draws) -> Program:
    """Return a program with the statements of two, in their order; some are left out, guarded or moved."""
    first = _pick(draws, _ALL)
    alike = {name: each for name, each in _ALL.items() if _dimensions(each) == _dimensions(first)}
    second = _pick(draws, alike if draws.chance(80) else _ALL)
    waiting = [[*program.body[:-1]] for program in (first, second)]
    body: list[str] = []
    while any(waiting):
        statement = draws.pick([statements for statements in waiting if statements]).pop(0)
        if draws.chance(8) and not statement.startswith("print"):
            statement = "if step % 2:\n    " + statement.replace("\n", "\n    ")
        elif draws.chance(5):
            continue
        body.append(statement)
    if body and draws.chance(30):
        one, other = draws.number(0, len(body) - 1), draws.number(0, len(body) - 1)
        body[one], body[other] = body[other], body[one]
    if draws.chance(20):
        body.insert(0, draws.pick([*_NEW_X, _ORDERED]))
    size = draws.pick([None, None, 2, 3, 5, 7])
    loop = first.loop if size is None else re.sub(r"batch_size=\d+", f"batch_size={size}", first.loop)
    header = ("torch.manual_seed(0)", *second.header[1:], *first.header)
    return replace(first, header=header, loop=loop, body=(*body, "print(x.tolist(), x.stride())"))
