"""Attempts in this process. Whole runs of several workers are in tests/flows."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from duoka.launchers.local import outputs_of
from duoka.planning.plan import Kind
from tests.flows.flow import ROOT, Flow
from tests.launchers.made import plan


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({"kind": Kind.PLAIN}, [1]),
        ({"kind": Kind.PLAIN, "log_dir": Path("logs")}, [1]),
        ({"kind": Kind.DISTRIBUTED}, []),
        ({"kind": Kind.API}, [1]),
        ({"kind": Kind.DISTRIBUTED, "log_dir": Path("logs")}, [1]),
    ],
)
def test_who_writes_to_a_log(
    given: dict[str, Any], ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(outputs_of(plan(**given))) as outputs:
        assert [rank for rank in range(2) if outputs.files.get(rank) is not None] == ranks


def test_an_attempt_can_follow_another_in_the_same_process(flow: Flow) -> None:
    """As in a restart: fork again, with another store."""
    source = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from duoka.launchers import local
        from duoka.launchers.processes import Outputs
        from duoka.launchers.processes import Signals
        from duoka.script import Target
        from duoka.planning.plan import Kind
        from duoka.watching.record import PublishedRun
        from tests.launchers.made import plan

        what = plan(target=Target("ranks.py"), kind=Kind.DISTRIBUTED)
        files = set()
        with Signals() as signals:
            run = local.RunContext(what, "id", Outputs(None, range(0)), signals, PublishedRun(what, is_shown=False))
            for number in range(3):
                verdict = local.attempt(run, number)
                files.add(len(os.listdir("/proc/self/fd")))
                os.write(1, f"{{verdict.why}} {{verdict.code}}\\n".encode())
        print(len(os.listdir("/proc/self/task")), "thread,", len(files), "number of open files")
        """
    flow.write(
        "ranks.py",
        """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"attempt {attempt}\\n".encode())
        if attempt < "2" and dist.get_rank() == 1:
            os._exit(5)
        dist.barrier()
        """,
    )
    stdout = flow.python([flow.write("first.py", source)]).ok().stdout
    ends = ["exited 5", "exited 5", "well 0"]
    attempts = [f"attempt {number}\n" * 2 + f"{end}\n" for number, end in enumerate(ends)]
    assert stdout == "".join(attempts) + "1 thread, 1 number of open files\n"


def test_ctrl_c_before_there_is_a_worker(flow: Flow) -> None:
    source = """
        import os, signal, sys
        import duoka.launchers.local as local
        from duoka.cli import main
        local.import_once = lambda plan: os.kill(os.getpid(), signal.SIGINT)
        open("empty.py", "w").close()
        sys.exit(main(["run", "-q", "--devices", "cpu:2", "empty.py"]))
        """
    result = flow.python([flow.write("first.py", source)])
    assert (result.returncode, result.stderr) == (130, "duoka: interrupted\n")


@pytest.mark.parametrize("kind", ["PLAIN", "DISTRIBUTED", "API"])
def test_torch_is_imported_before_workers_are_forked(kind: str) -> None:
    """Else each worker takes the time and the memory of the import."""
    source = f"""
import sys
from duoka.launchers import local
from duoka.planning.plan import Kind
from tests.launchers.made import plan
local.import_once(plan(kind=Kind.{kind}))
print("torch.distributed" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
