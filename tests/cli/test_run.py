from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from duoka.cli import main, run
from duoka.cli.run import command
from duoka.hardware import locks
from duoka.planning.options import Options
from duoka.script import Target
from tests.flows.flow import surroundings
from tests.hardware.driver import play

# A new option is a decision: it is worth a line here, and a note in docs/decisions/.
OPTIONS = """
    --blocks --checkpoint-activations --cpu-offload --device-memory
    -h/--help -m -q/--quiet -v/--verbose --batch-norm --devices --dry-run --kind --loading --row-independent --log-dir
    --key-file --report --machine --machines --rendezvous
    --randomness --restarts --rows --step-timeout --strategy --shares --threads --timeout --wait
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("train.py").write_text("import torch")
    Path("pack").mkdir()
    Path("pack/train.py").write_text("import torch")


def test_the_options() -> None:
    context = command.make_context("run", ["train.py"])
    # In click 8.2 the names of --help are in any order.
    options = {frozenset(param.opts) for param in command.get_params(context) if param.opts[0].startswith("-")}
    assert options == {frozenset(names.split("/")) for names in OPTIONS.split()}


def test_help_has_every_option_and_the_three_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    for option in OPTIONS.split():
        assert option.split("/")[-1] in text
    for form in (
        "[OPTIONS] SCRIPT [ARGS]...",
        "[OPTIONS] -m MODULE [ARGS]...",
        "SCRIPT [OPTIONS] -- [ARGS]...",
    ):
        assert f"duoka run {form}" in text
    assert "duoka run train.py --devices 0,3 -- --epochs 5" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("--devices cpu:2 --dry-run train.py --epochs 5", "train.py --epochs 5"),
        ("train.py --devices cpu:2 --dry-run -- --epochs 5", "train.py --epochs 5"),
        ("train.py --devices cpu:2 --dry-run", "train.py"),
        ("--wait --devices cpu:2 --dry-run train.py", "train.py"),
        ("--devices cpu:2 --dry-run --wait=5m train.py --wait", "train.py --wait"),
        ("train.py --devices cpu:2 --wait --dry-run -- --wait x", "train.py --wait x"),
        ("--dry-run --devices cpu:2 -m pack.train x --dry-run", "-m pack.train x --dry-run"),
    ],
)
def test_a_dry_run_prints_the_plan_and_starts_nothing(
    typed: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("raise SystemExit('started')")
    assert main(["run", *typed.split()]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"run         {shown}\n")
    assert "device      rank 1: CPU\n" in out
    assert err == ""


def test_all_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    typed = (
        "--devices cpu:3 --strategy ddp --batch-norm local --randomness worker --loading whole "
        "--log-dir logs --threads 2 --timeout 1.5m --restarts 3 --kind plain --dry-run train.py"
    )
    assert main(["run", *typed.split()]) == 0
    out = capsys.readouterr().out
    for line in (
        "strategy    ddp: ",
        "batch norm  local",
        "randomness  worker",
        "loading     whole",
        "device      rank 2: CPU",
        "threads     2 per worker",
        "timeout     90 s",
        "restarts    3 at most, after faults",
        "output      of rank 0 here, of the others in logs",
    ):
        assert f"\n{line}" in out


def test_picked_cards_are_held_shown_and_not_picked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, "eight")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path / "locks")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first = run._allocate(Options(Target("train.py"), devices="free:2"), 0)
    assert [device.index for device in first.decided.devices] == [1, 3]
    assert main(["run", "--dry-run", "--devices", "free:2", "train.py"]) == 0
    assert "device      rank 1: GPU 6 (" in capsys.readouterr().out
    assert main(["gpus"]) == 0
    assert f"duoka run train.py (pid {os.getpid()}, since " in capsys.readouterr().out.splitlines()[3]
    shared = run._allocate(Options(Target("train.py"), devices="3,4"), 0)
    assert shared.notes == (f"GPU 3 is also used by duoka run train.py (pid {os.getpid()})",)
    assert main(["run", "--devices", "4,", "--wait=0.01", "train.py"]) == 2
    assert "--devices 4,: GPU 4: duoka run train.py (pid " in capsys.readouterr().err
    assert main(["run", "--devices", "free:3", "--wait=0.01", "train.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("duoka: waiting for devices: GPU 0: pid 4194301; GPU 1: duoka run train.py (pid ")
    assert "duoka: error: --devices free:3: 2 GPUs are available now" in said
    shared.locks.close()
    first.locks.close()
    again = run._allocate(Options(Target("train.py"), devices="free:1"), 0)
    assert [device.index for device in again.decided.devices] == [1]
    again.locks.close()


def test_a_part_of_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, "mig")
    monkeypatch.setattr(locks, "runtime_folder", lambda: tmp_path / "locks")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for devices in ("free:1", "MIG-2222"):
        assert main(["run", "--dry-run", "--devices", devices, "train.py"]) == 0
        assert "device      rank 0: GPU 0:2 (NVIDIA A100-SXM4-40GB MIG 1g.5gb)" in capsys.readouterr().out
    allocation = run._allocate(Options(Target("train.py"), devices="MIG-2222"), 0)
    assert main(["gpus"]) == 0
    assert f"duoka run train.py (pid {os.getpid()}, since " in capsys.readouterr().out.splitlines()[4]
    assert main(["run", "--devices", "free:1", "train.py"]) == 2
    assert f"GPU 0:2: duoka run train.py (pid {os.getpid()}) has locked it" in capsys.readouterr().err
    allocation.locks.close()


def test_an_option_of_the_script_before_it_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--epochs", "2", "train.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("duoka: error: no such option '--epochs'.")
    assert lines[1] == "duoka: options of the script follow it: duoka run train.py --epochs 5"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "a script is missing; for example: duoka run train.py"),
        ("-m", "a script is missing"),
        ("--devices 2", "a script is missing"),
        ("--devics 2 train.py", "no such option '--devics'. Did you mean '--devices'?"),
        ("train.py --devics 2 -- x", "no such option '--devics'. Did you mean '--devices'?"),
        ("train.py a -- b", "'a' stands between train.py and --"),
        ("--devices 0,0 train.py", "--devices must be auto, cpu, "),
        ("--devices cuda:99 train.py", "--devices cuda:99: "),
        (
            "--strategy ddpd train.py",
            "--strategy must be one of auto, ddp, exact, fsdp, hsdp, single, but is 'ddpd'; did you mean ddp?",
        ),
        (
            "--kind plan train.py",
            "--kind must be one of auto, plain, distributed, api, but is 'plan'; did you mean plain?",
        ),
        (
            "--batch-norm hole train.py",
            "--batch-norm must be one of whole, local, but is 'hole'; did you mean whole?",
        ),
        ("--threads two train.py", "--threads must be a whole number from 1 to 4096, but is 'two'"),
        ("--threads 0 train.py", "--threads must be a whole number from 1 to 4096, but is 0"),
        (
            "--timeout soon train.py",
            "--timeout must be more than 0 seconds and at most 30 days, like 90, 90s, 10m or 1h",
        ),
        ("--restarts often train.py", "--restarts must be a whole number from 0 to 1000, but is 'often'"),
        ("--wait=soon train.py", "--wait must be more than 0 seconds and at most 30 days"),
        ("--wait 30m train.py", "--wait takes a time after an =: --wait=30m"),
        ("--devices free train.py", "--devices must be auto, cpu, "),
        ("--log-dir train.py train.py", "--log-dir must be a directory"),
        ("--quiet --verbose train.py", "--quiet and --verbose exclude each other"),
        ("--quiet=yes train.py", "option '--quiet' does not take a value"),
        ("--nnodes 2 train.py", "no such option '--nnodes': here it is --machines, as in `duoka run --machines 2"),
        ("--machines 2 train.py", "--machine must be given with --machines, from 0 to 1"),
        ("--machines 2 --machine 2 --rendezvous a:1 train.py", "--machine must be from 0 to 1, but is 2"),
        ("--machines 2 --machine 1 --rendezvous node1 train.py", "--rendezvous must be HOST:PORT, like node1:29500"),
        ("trian.py", "there is no script 'trian.py'; did you mean 'train.py'?"),
        ("pack", "'pack' is a directory"),
        ("-m pack.trian", "there is no module 'pack.trian'"),
        ("-m train.py", "there is no module 'train.py'; to run a file leave -m out"),
    ],
)
def test_wrong_input_gets_one_message_and_exit_code_2(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"duoka: error: {said}")
    assert err.count("error") == 1
    assert "Traceback" not in err


def test_a_dry_run_of_several_machines_waits_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--machines 2 --machine 1 --rendezvous node1:29500 --devices cpu --dry-run train.py"
    assert main(["run", *typed.split()]) == 0
    out = capsys.readouterr().out
    assert "strategy    ddp: " in out
    assert "machine     1 of 2, rendezvous at node1:29500\ndevice      local rank 0: CPU\n" in out


def test_srun_tells_of_the_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ID", 0), ("NUM_TASKS", 2), ("NUM_NODES", 2), ("NODELIST", "gpu[3-4]")):
        monkeypatch.setenv(f"SLURM_STEP_{name}", str(value))
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    words = ["run", "--devices", "cpu", "--dry-run"]
    assert main([*words, "train.py"]) == 0
    assert "machine     1 of 2, rendezvous at gpu3:" in capsys.readouterr().out
    assert main([*words, "--machines", "1", "train.py"]) == 0
    assert "machine  " not in capsys.readouterr().out
    for name, value in (("STEP_NUM_TASKS", 16), ("STEP_TASKS_PER_NODE", "8(x2)"), ("NODEID", 0), ("LOCALID", 1)):
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert main([*words, "train.py"]) == 0
    assert "rank        1 of 16, rendezvous at gpu3:" in capsys.readouterr().out
    assert main(["run", "--devices", "cpu:3", "--dry-run", "train.py"]) == 2
    shown = capsys.readouterr().err
    assert "--devices must be one device for each rank, but is '3 devices for 8 ranks on this machine'" in shown
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "17")
    assert main([*words, "train.py"]) == 2
    assert "the number of processes set by Slurm must be at least one for each machine" in capsys.readouterr().err


class Begun(BaseException):
    """Replaces os.execv in this process."""


def test_python_is_started_again_where_it_would_hash_otherwise_than_on_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(path: str, words: list[str]) -> None:
        assert (path, words) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
        assert os.environ["PYTHONHASHSEED"] == "0"
        raise Begun

    monkeypatch.setattr(os, "environ", dict(os.environ, PYTHONHASHSEED="random"))
    monkeypatch.setattr(os, "execv", begin)
    with pytest.raises(Begun):
        main(["run", "--machines", "2", "--machine", "0", "--rendezvous", "127.0.0.1:1", "train.py"])


@pytest.mark.long
def test_python_is_started_again_where_machines_would_go_through_sets_in_different_orders(
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    Path("train.py").write_text("import os\nprint(os.environ['PYTHONHASHSEED'], *{'a', 'b', 'c', 'd'})\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
    words = ["run", "-q", "--devices", "cpu:1", "--machines", "2", "--rendezvous", rendezvous, "--machine"]
    second = subprocess.Popen(
        [sys.executable, "-m", "duoka", *words, "1", "train.py"], env=surroundings({"PYTHONHASHSEED": "0"})
    )
    first = command(*words, "0", "train.py")
    alone = command("run", "-q", "--devices", "cpu:1", "train.py", env={"PYTHONHASHSEED": "0"})
    assert second.wait() == first.returncode == 0, first.stderr
    assert first.stdout == alone.stdout
    assert alone.stdout.startswith("0 ")
