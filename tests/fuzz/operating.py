"""Programs that call one of torch's operations with torch's own samples, and write to what it took or returned."""

from __future__ import annotations

from tests.fuzz.draws import Draws
from tests.fuzz.program import Program
from tests.fuzz.samples import cases_of, operations

# {t}: a result, an operand, or a batch.
WRITES = (
    *("{t}.mul_(2)", "{t}.add_(1)", "{t}.zero_()", "{t}[0] = 3", "{t}.fill_(step)", "{t}.detach().fill_(2)"),
    *("with torch.no_grad(): {t}.add_(1)", "{t}[-1].add_(1)", "{t}.copy_({t}.flip(0))"),
    *("{t}.transpose(0, -1).add_(1)", "{t}.view(-1)[0] = 5", "{t}.flatten()[:2].zero_()", "{t}[{t} > 0] = 0"),
    *("{t}.unsqueeze_(0)", "{t}.requires_grad_(False)", "{t}.t_()", "{t}.masked_fill_({t} != 0, 1)"),
)
TO_DATA = "call.results[0].data.mul_(2)"  # of the operands some functions save other forms than one device does
TENSORS = ("call.results[0]", "call.results[0]", "call.results[-1]", "call.batches[0]", "call.operands[-1]")


def operating(draws: Draws) -> Program:
    """Return a program that repeats one call."""
    name = draws.pick([*operations()])
    if not cases_of(name):
        return operating(draws)
    number = draws.number(0, len(cases_of(name)) - 1)
    calls = f"call = Call({name!r}, {number}, units, {draws.chance(75)})"
    body = [calls, "print(call.flags())"]
    for _ in range(draws.number(1, 2)):
        write = draws.pick((*WRITES, TO_DATA)).format(t=draws.pick(TENSORS))
        body.append(f"if step % 2: {write}" if draws.chance(20) and not write.startswith("with") else write)
    body += ["print(call.flags())", "print(call.values())", "print(call.gradients())"]
    header = ("from tests.fuzz.samples import Call", "units = torch.ones(4096, dtype=torch.float64)")
    return Program(header, "for step in range(2):", tuple(body))
