from __future__ import annotations

import pytest

from tests.flows.flow import Flow
from tests.flows.group import group, run

DEBUGGERS = {
    "breakpoint()": "breakpoint()",
    "pdb": "import pdb; pdb.set_trace()",
    "post mortem": "import pdb\ntry: 1 / 0\nexcept ZeroDivisionError as error: pdb.post_mortem(error.__traceback__)",
    "its own": "import pdb; pdb.Pdb().set_trace()",
}


@pytest.mark.parametrize("how", DEBUGGERS)
@pytest.mark.parametrize("workers", [2, 3])
def test_a_debugger_in_several_workers_says_how_to(flow: Flow, how: str, workers: int) -> None:
    result = run(flow, flow.write("plain.py", f"import torch\n{DEBUGGERS[how]}\n"), workers=workers)
    assert result.returncode == 1
    assert f"in {workers} workers, which cannot share the terminal; use one device (--devices cpu:1" in result.stderr
    assert result.stderr.count("Refused") == 1


@pytest.mark.parametrize("how", ["breakpoint()", "pdb"])
def test_a_rank_without_the_terminal_says_who_has_it(flow: Flow, how: str) -> None:
    result = run(flow, group(flow, f"if rank == 1:\n    {DEBUGGERS[how]}\nbarrier()"))
    assert result.returncode == 1
    assert "or call it on rank 0 alone" in result.stderr


def test_a_debugger_that_reads_from_elsewhere_works_on_every_rank(flow: Flow) -> None:
    script = group(
        flow,
        """
        import io, pdb
        where, said = 7, io.StringIO()
        pdb.Pdb(stdin=io.StringIO("p where * 6\\nc\\n"), stdout=said).set_trace()
        barrier()
        say("42" in said.getvalue())
        """,
    )
    assert run(flow, script).ok().stdout == "True\n" * 2


@pytest.mark.parametrize("how", ["breakpoint()", "pdb"])
def test_on_one_worker_it_works(flow: Flow, how: str) -> None:
    script = flow.write("plain.py", f"import torch\n{DEBUGGERS[how]}\nprint('went on')\n")
    assert "went on" in flow.run(["run", "-q", "--devices", "cpu:1", script], stdin="c\n").ok().stdout


def test_breakpoints_can_be_ignored(flow: Flow) -> None:
    script = flow.write("plain.py", "import torch\nbreakpoint()\nprint('went on')\n")
    words = ["run", "-q", "--devices", "cpu:2", script]
    assert flow.run(words, env={"PYTHONBREAKPOINT": "0"}).ok().stdout == "went on\n"
