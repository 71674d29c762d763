"""`duoka run` from its words to its exit code."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.flows.flow import Flow

Command = Callable[..., subprocess.CompletedProcess[str]]

WORDS = "import sys; print(sys.argv[1:])"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--devices {} script.py --epochs 5", ["--epochs", "5"]),
        ("--devices {} script.py --devices 3 --quiet -m", ["--devices", "3", "--quiet", "-m"]),
        ("script.py --devices {} -- --epochs 5 -- x", ["--epochs", "5", "--", "x"]),
        ("--devices {} script.py --", []),
        ("--devices {} script.py -- --", ["--"]),
        ("--devices {} -m pack.script -v", ["-v"]),
    ],
)
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_the_scripts_words_arrive_untouched(flow: Flow, typed: str, words: list[str], devices: str) -> None:
    flow.write("script.py", WORDS)
    flow.write("pack/script.py", WORDS)
    assert flow.run(["run", *typed.format(devices).split()]).ok().stdout == f"{words}\n"


def test_options_after_a_script_that_takes_none(flow: Flow) -> None:
    script = flow.write("script.py", "print('once')")
    result = flow.run(["run", script, "--devices", "cpu:2"]).ok()
    assert result.stdout == "once\n"
    assert result.stderr.startswith("duoka: 2 CPU workers ")


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_the_header_is_on_standard_error_and_can_be_left_out(flow: Flow, devices: str) -> None:
    script = flow.write("script.py", "print('out')")
    normal = flow.run(["run", "--devices", devices, script]).ok()
    quiet = flow.run(["run", "--devices", devices, "--quiet", script]).ok()
    verbose = flow.run(["run", "--devices", devices, "--verbose", script]).ok()
    assert normal.stdout == quiet.stdout == verbose.stdout == "out\n"
    assert normal.stderr.startswith("duoka: ")
    assert "plain script" in normal.stderr.splitlines()[0]
    assert quiet.stderr == ""
    assert all(line.startswith("duoka: ") for line in verbose.stderr.splitlines())
    assert "duoka: timeout     600 s" in verbose.stderr


def test_a_script_with_ranks_of_its_own_is_run_once(flow: Flow) -> None:
    source = """
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def work(rank, size, place):
            dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
            total = dist.get_world_size()
            dist.barrier()  # a rank that leaves while the other still connects is an error of gloo's
            dist.destroy_process_group()
            print(f"{rank} of {total}\\n", end="")  # in one write, as both print

        if __name__ == "__main__":
            mp.start_processes(work, (2, f"file://{__file__}.store"), nprocs=2, start_method="fork")
            print("main")
        """
    result = flow.run(["run", "--devices", "cpu:2", flow.write("script.py", source)]).ok()
    assert sorted(result.stdout.splitlines()) == ["0 of 2", "1 of 2", "main"]
    assert "run once, as it has ranks of its own (script.py:6 gives init_process_group" in result.stderr


def test_a_script_that_can_be_either_is_told_how_to_be_the_other(flow: Flow) -> None:
    source = """
        import os, torch
        if os.environ.get("RANK") is not None:
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()
            os.write(1, b"launched\\n")  # in one piece, whatever the other writes
            torch.distributed.destroy_process_group()
        else:
            print("plain")
        """
    script = flow.write("script.py", source)
    plain = flow.run(["run", "--devices", "cpu:2", script]).ok()
    assert plain.stdout == "plain\n"
    assert "script.py can also make its own ranks (script.py:3 reads RANK if it is set)" in plain.stderr
    launched = flow.run(["run", "--devices", "cpu:2", "--kind", "distributed", script]).ok()
    assert launched.stdout == "launched\n" * 2
    assert flow.run(["run", "--devices", "cpu", script]).ok().stdout == "plain\n"


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_script_that_does_not_parse_is_shown_once_as_python_shows_it(flow: Flow, devices: str) -> None:
    script = flow.write("script.py", "x = = 1\n")
    python = flow.python([script])
    result = flow.run(["run", "--quiet", "--devices", devices, script])
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(python.stderr)
    assert result.stderr.count("SyntaxError") == 1


def test_wrong_input_ends_with_2_and_starts_nothing(flow: Flow) -> None:
    script = flow.write("script.py", "open('started', 'w')")
    result = flow.run(["run", "--devices", "0,0", script])
    assert result.returncode == 2
    assert result.stderr.startswith("duoka: error: --devices must be ")
    assert not (flow.folder / "started").exists()


def test_the_installed_command(flow: Flow, command: Command) -> None:
    source = """
        import sys, torch
        print(torch.ones(3).sum().item(), sys.argv[1])
        sys.exit(7)
        """
    done = command("run", "--devices", "cpu:2", flow.write("script.py", source), "word")
    assert (done.returncode, done.stdout) == (7, "3.0 word\n")
    assert done.stderr.startswith("duoka: 2 CPU workers ")


TYPED = """
import os, sys
import torch
print(sys.argv, __file__, repr(sys.path[0]), repr(sys.stdin.read()))
torch.manual_seed(0)
loss = torch.nn.Linear(2, 1)(torch.randn(8, 2)).mean()
loss.backward()
print(loss.item())
sys.exit(os.path.exists(__file__))
"""


@pytest.mark.parametrize("options", [["--devices", "cpu:1"], ["--devices", "cpu:2"], ["--devices", "cpu:2", "-q"]])
def test_a_script_on_standard_input(flow: Flow, options: list[str]) -> None:
    _, number = flow.python([flow.write("script.py", TYPED)]).stdout.splitlines()
    said = flow.run(["run", *options, "-", "--epochs", "5"], stdin=TYPED).ok().stdout
    assert said == f"['-', '--epochs', '5'] <stdin> '' ''\n{number}\n"  # as `python -` has it


def test_an_error_of_a_script_on_standard_input_names_its_line(flow: Flow) -> None:
    said = flow.run(["run", "-q", "-", "--devices", "cpu:2", "--"], stdin="import torch\nraise ValueError('boom')")
    assert said.returncode == 1
    assert (
        said.stderr == 'Traceback (most recent call last):\n  File "<stdin>", line 2, in <module>\nValueError: boom\n'
    )
