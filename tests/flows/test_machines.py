"""`duoka run` on several machines. Here they are all this one: what they have in common is only what they say."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result, Running
from tests.flows.group import group, until

SAME_HASHES = {"PYTHONHASHSEED": "0"}  # else each command begins anew, which what is forked for a test cannot
KEY = {"DUOKA_KEY": "a secret of the tests"}
SAME = SAME_HASHES | KEY


def free_place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def start(
    flow: Flow, script: Path | str, *args: str, workers: Sequence[int] = (1, 1), options: tuple[str, ...] = ()
) -> list[Running]:
    """A command for each machine. workers: of each."""
    place = free_place()
    return [
        flow.start(
            [
                "run",
                "--quiet",
                "--devices",
                f"cpu:{count}",
                *machine(number, len(workers), place),
                *options,
                script,
                *args,
            ],
            env=SAME | {"HERE": str(number)},
        )
        for number, count in enumerate(workers)
    ]


def machine(number: int, count: int, place: str) -> list[str]:
    return ["--machines", str(count), "--machine", str(number), "--rendezvous", place]


def run(flow: Flow, script: Path | str, *args: str, **how: object) -> list[Result]:
    return [one.wait() for one in start(flow, script, *args, **how)]  # type: ignore[arg-type]


PLAIN = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(37, 8)
y = (x.sum(1) > 0).long()
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, y)
names = {"a", "b", "c", "d"}
for epoch in range(2):
    total = 0.0
    for a, b in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(net(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(a)
    print(epoch, *names, f"{total / len(x):.5f}")
with open("losses.txt", "a") as file:
    print(f"{total:.4f}", file=file)
print(open("losses.txt").read())
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
def test_a_plain_script_prints_and_saves_what_one_device_does(flow: Flow, workers: tuple[int, ...]) -> None:
    import torch

    script = flow.write("train.py", PLAIN)
    alone = flow.python([script], env=SAME_HASHES).ok().stdout
    expected = torch.load(flow.folder / "net.pt")
    (flow.folder / "losses.txt").unlink()
    first, *others = run(flow, script, workers=workers)
    assert first.ok().stdout == alone
    assert [one.ok().stdout for one in others] == [""] * len(others)
    found = torch.load(flow.folder / "net.pt")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


PARTS = (
    PLAIN
    + """
import duoka
held = [*net.parameters(), *(p.grad for p in net.parameters())]
print("bytes", sum(tensor.untyped_storage().nbytes() for tensor in held))
with duoka.Checkpoint("kept", {"model": net, "optimizer": optimizer}) as kept:
    kept.save()
duoka.save_weights(net, "weights.safetensors", max_shard_size=600)
"""
)


CHOSEN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(64, 500)
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
print(sum(p.untyped_storage().nbytes() for p in model.parameters()))
"""


def test_each_machine_holds_a_copy_of_a_sharded_model(flow: Flow) -> None:
    import torch

    import duoka

    script = flow.write("train.py", PARTS)
    *alone, whole = flow.python([script], env=SAME_HASHES).ok().stdout.splitlines()
    expected = torch.load(flow.folder / "net.pt")
    for name in ("losses.txt", "net.pt"):
        (flow.folder / name).unlink()
    shutil.rmtree(flow.folder / "kept")
    first, other = run(flow, script, workers=(2, 2), options=("--strategy", "hsdp"))
    assert other.ok().stdout == ""
    *lines, part = first.ok().stdout.splitlines()
    assert lines == alone
    assert int(whole.split()[1]) == 2 * int(part.split()[1])
    found = torch.load(flow.folder / "net.pt")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), *[torch.nn.ReLU()] * 2)
    net.append(torch.nn.Linear(16, 2))
    for saved in ("kept", "weights.safetensors"):
        duoka.load_weights(net, flow.folder / saved)
        assert all(torch.equal(found[name], value) for name, value in net.state_dict().items())
        net.apply(lambda part: part.reset_parameters() if hasattr(part, "reset_parameters") else None)
    (step,) = (flow.folder / "kept").glob("step-*")
    assert len(list(step.glob("model-*-of-00002.safetensors"))) == 2  # of the ranks of the first machine


@pytest.mark.long
def test_both_machines_choose_the_same_strategy(flow: Flow) -> None:
    script = flow.write("train.py", CHOSEN)
    expected = flow.python([script], env=SAME_HASHES).ok().stdout.splitlines()
    for memory, part in (("17MB", 2), ("13MB", 4)):  # hsdp, fsdp
        first, other = run(flow, script, workers=(2, 2), options=("--strategy", "auto", "--device-memory", memory))
        assert other.ok().stdout == ""
        *lines, held = first.ok().stdout.splitlines()
        assert lines == expected[:-1]
        assert int(held) * part == int(expected[-1])


def test_machines_of_different_sizes_hold_no_copies(flow: Flow) -> None:
    script = flow.write("train.py", PLAIN)
    for result in run(flow, script, workers=(2, 1), options=("--strategy", "hsdp")):
        assert result.returncode == 2
        assert "--strategy must be fsdp on machines with different numbers of workers" in result.stderr


def test_exact_has_the_same_bits_on_two_machines(flow: Flow) -> None:
    import torch

    script = flow.write("train.py", PLAIN)
    flow.run(["run", "--quiet", "--devices", "cpu:1", "--strategy", "exact", script], env=SAME_HASHES).ok()
    expected = torch.load(flow.folder / "net.pt")
    for result in run(flow, script, options=("--strategy", "exact")):
        result.ok()
    found = torch.load(flow.folder / "net.pt")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_script_with_the_api_knows_its_machine(flow: Flow) -> None:
    script = flow.write(
        "api.py",
        """
        import torch
        import duoka
        run = duoka.start(seed=0)
        model = run.model(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in run.loader(torch.utils.data.TensorDataset(torch.randn(22, 4)), batch_size=6, shuffle=True):
            loss = model(x).square().mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad()
        run.print(f"{loss.item():.5f}")
        places = run.gather_objects((run.rank, run.world_size, run.local_rank))
        if run.world_size > 1:
            run.print(places)
        """,
    )
    alone = flow.python([script]).ok().stdout
    first, _ = run(flow, script, workers=(2, 1))
    assert first.ok().stdout == f"{alone}[(0, 3, 0), (1, 3, 1), (2, 3, 0)]\n"


def test_a_script_with_its_own_ranks_is_told_what_torchrun_would_tell(flow: Flow) -> None:
    script = group(
        flow,
        """
        names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR".split()
        say(*(os.environ[name] for name in names), os.environ["TORCHELASTIC_RUN_ID"], os.environ["MASTER_PORT"])
        dist.destroy_process_group()
        """,
    )
    first, second = run(flow, script, workers=(2, 1))
    lines = [line.rsplit(" ", 2) for line in sorted((first.ok().stdout + second.ok().stdout).splitlines())]
    assert [line for line, *_ in lines] == [
        "0 0 0 3 2 2 127.0.0.1",
        "1 1 0 3 2 2 127.0.0.1",
        "2 0 1 3 1 2 127.0.0.1",
    ]
    assert len({tuple(same) for _, *same in lines}) == 1


HEADER = """\
duoka: 1 CPU worker, strategy ddp, plain script
duoka: machine {number} of 2, rendezvous at {place}
duoka: rank {number} of 2 is here
"""


def test_the_header_says_which_ranks_are_where_and_logs_are_named_by_rank(flow: Flow) -> None:
    script, place = flow.write("train.py", "import torch\nprint('said')\n"), free_place()
    words = ["run", "--devices", "cpu:1", "--log-dir", "logs"]
    running = [flow.start([*words, *machine(number, 2, place), script], env=SAME) for number in range(2)]
    for number, one in enumerate(running):
        result = one.wait().ok()
        assert result.stderr == HEADER.format(number=number, place=place)
        assert result.stdout == ("" if number else "said\n")
    assert [path.name for path in flow.folder.glob("logs/*")] == ["rank1.log"]


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("raise ValueError('boom')", 1, "rank 2 raised ValueError: boom"),
        ("sys.exit(7)", 7, "rank 2 exited with code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 was killed by SIGKILL"),
    ],
)
def test_what_one_rank_does_ends_all_machines_with_its_code(fault: str, code: int, told: str, flow: Flow) -> None:
    script = group(flow, f"if rank == 2:\n    {fault}\nwhile True: barrier()\n")
    first, second = run(flow, script, workers=(2, 1))
    assert (first.returncode, second.returncode) == (code, code), (str(first), str(second))
    host = socket.gethostname()
    assert f"duoka: {told} (on machine 1 ({host})); the run was ended" in first.stderr
    assert "rank 2 of 3" in second.stderr
    assert first.stderr.count("boom") == int("boom" in fault)
    assert second.stderr.count("Traceback") == int("boom" in fault)


def test_ranks_that_leave_while_another_machine_goes_on(flow: Flow) -> None:
    script = group(flow, "if rank == 1: sys.exit()\nwhile True: barrier()\n")
    for result in run(flow, script):
        assert result.returncode == 1
        assert f"duoka: the scripts of machine 1 ({socket.gethostname()}) ended while other ranks" in result.stderr


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("raise ValueError('boom')", 1)])
def test_what_all_ranks_do_is_the_script_s(end: str, code: int, flow: Flow) -> None:
    script = flow.write("script.py", f"import sys\nimport torch\n{end}\n")
    alone = flow.python([script])
    for result in run(flow, script):
        assert (result.returncode, result.stderr) == (code, alone.stderr)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_machine_whose_command_is_killed_ends_the_others(victim: int, flow: Flow) -> None:
    running = start(flow, group(flow, "say('ready')\nwhile True: barrier()"), workers=(1, 1, 1))
    until(lambda: all("ready" in one.stdout() for one in running))
    running[victim].send(signal.SIGKILL)
    since = time.monotonic()
    results = [one.wait() for one in running]
    assert time.monotonic() - since < 20
    assert [one.returncode for one in results] == [137 if number == victim else 1 for number in range(3)]
    for number, result in enumerate(results):
        if number != victim:
            assert f"duoka: machine {victim} ({socket.gethostname()}) is gone: " in result.stderr


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_end_asks_the_others(asked: int, number: signal.Signals, flow: Flow) -> None:
    running = start(flow, group(flow, "say('ready')\nwhile True: barrier()"))
    until(lambda: all("ready" in one.stdout() for one in running))
    running[asked].send(number)
    results = [one.wait() for one in running]
    assert [one.returncode for one in results] == [128 + number] * 2
    word = "interrupted" if number is signal.SIGINT else "stopped"
    for result in results:
        assert f"duoka: {word}" in result.stderr


STEPS = """
import os, signal, sys, time
import torch
here = os.environ["HERE"]  # the number of the machine, which no script is told
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def steps(count):
    for _ in range(count):
        net(torch.ones(4, 4)).sum().backward()
        optimizer.step()
steps(3)
"""


def test_a_rank_for_which_another_machine_waits_is_named_by_its_own(flow: Flow) -> None:
    script = flow.write("train.py", STEPS + "if here == '1': time.sleep(60)\nsteps(2)\n")
    first, second = run(flow, script, workers=(2, 1), options=("--step-timeout", "1"))
    assert (first.returncode, second.returncode) == (1, 1)
    host = re.escape(socket.gethostname())
    told = rf"duoka: rank 2 of 3 \({host}\) in step 4 has not joined \w+ \d+ at train.py:\d+; it is in train.py:12"
    assert re.search(rf"{told}, asleep; ranks 0 and 1 have waited for \d s", second.stderr), second
    assert f"duoka: rank 2 did not come (on machine 1 ({socket.gethostname()})); the run was ended" in first.stderr


def test_ranks_of_two_machines_that_go_different_ways_are_told(flow: Flow) -> None:
    script = flow.write(
        "train.py", STEPS + "if here == '1':\n    steps(1)\nelse:\n    print(net(torch.ones(4, 4)).sum().item())\n"
    )
    results = run(flow, script, options=("--timeout", "5"))
    assert [one.returncode for one in results] == [1, 1]
    assert any("the ranks called different collectives" in one.stderr for one in results), results


RESTARTED = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0:
    say("attempt", attempt)
"""


def test_after_a_fault_on_one_machine_all_begin_again(flow: Flow) -> None:
    fault = "if attempt == 0 and rank == 2: os._exit(7)\nif attempt == 0: time.sleep(5)\nbarrier()\n"
    first, second = run(flow, group(flow, RESTARTED + fault), workers=(2, 1), options=("--restarts", "1"))
    assert first.ok().stdout == "attempt 0\nattempt 1\n"
    where = f" (on machine 1 ({socket.gethostname()}))"
    assert f"duoka: restart 1 of 1 after: rank 2 exited with code 7{where}\n" in first.stderr
    assert "duoka: restart 1 of 1 after: rank 2 exited with code 7\n" in second.ok().stderr


def test_what_is_no_fault_is_not_tried_again_on_any_machine(flow: Flow) -> None:
    for result in run(flow, group(flow, "say('once')\nsys.exit(3)\n"), options=("--restarts", "1")):
        assert (result.returncode, result.stdout) == (3, "once\n")
        assert "restart" not in result.stderr


def test_a_script_s_own_answer_to_a_signal_counts_everywhere(flow: Flow) -> None:
    script = group(
        flow, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nsay('ready')\nwhile True: barrier()"
    )
    running = start(flow, script)
    until(lambda: all("ready" in one.stdout() for one in running))
    running[1].send(signal.SIGTERM)
    assert [one.wait().returncode for one in running] == [75, 75]


def test_a_machine_that_cannot_begin_says_why_to_the_others(flow: Flow) -> None:
    script, place = flow.write("train.py", "import torch\n"), free_place()
    flow.write("taken/rank1.log/x", "")
    words = ["run", "--quiet", "--devices", "cpu:1", "--log-dir", "taken"]
    running = [flow.start([*words, *machine(number, 2, place), script], env=SAME) for number in range(2)]
    first, second = [one.wait() for one in running]
    assert (first.returncode, second.returncode) == (1, 2)
    assert "duoka: error: --log-dir must be a directory that can be written" in second.stderr
    assert f"duoka: machine 1 ({socket.gethostname()}) is gone: --log-dir must be" in first.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.py", "--epochs", "2"], "the script's argument list is ['--epochs', '2'] on"),
        (["--batch-norm", "local", "train.py", "--epochs", "1"], "--batch-norm is 'local' on"),
        (["other/train.py", "--epochs", "1"], "the content of train.py is "),
    ],
)
def test_machines_that_were_asked_for_different_things_are_refused(words: list[str], told: str, flow: Flow) -> None:
    place = free_place()
    flow.write("train.py", "import torch\n")
    flow.write("other/train.py", "import torch  # another\n")
    for_all = ["run", "--quiet", "--devices", "cpu:1"]
    right = ["train.py", "--epochs", "1"]
    first = flow.start([*for_all, *machine(0, 2, place), *right], env=SAME)
    other = flow.run([*for_all, *machine(1, 2, place), *words], env=SAME)
    assert other.returncode == 2
    host = socket.gethostname()
    where = f"on machine 1 ({host}), but differs on machine 0\n"
    assert other.stderr.startswith(f"duoka: error: all machines must have the same settings: {told}")
    assert other.stderr.endswith(where)
    flow.run([*for_all, *machine(1, 2, place), *right], env=SAME).ok()  # which is waited for
    first.wait().ok()


def test_nobody_waits_for_ever_for_a_machine(flow: Flow) -> None:
    script, place = flow.write("train.py", "import torch\n"), free_place()
    words = ["run", "--quiet", "--devices", "cpu:1", "--timeout", "1", *machine(0, 2, place), script]
    alone = flow.run(words, env=SAME)
    assert alone.returncode == 1
    assert alone.stderr == (
        f"duoka: error: machine 0 gave up waiting for machine 1: no connection at {place} in 1 s\n"
    )
    words[words.index("0")] = "1"
    alone = flow.run(words, env=SAME)
    assert alone.returncode == 1
    assert f"machine 1 gave up waiting for machine 0: it did not answer at {place} in 1 s" in alone.stderr


def test_without_a_key_it_is_said_what_that_means(flow: Flow) -> None:
    script, place = flow.write("train.py", "import torch\n"), free_place()
    words = ["run", "--quiet", "--devices", "cpu:1"]
    running = [flow.start([*words, *machine(number, 2, place), script], env=SAME_HASHES) for number in range(2)]
    first, second = [one.wait().ok() for one in running]
    assert "duoka: the machines share no key, so anybody who reaches this port can take part" in first.stderr
    assert second.stderr == ""


def test_who_has_another_key_is_not_heard_and_does_not_matter(flow: Flow) -> None:
    script, place = (
        flow.write("train.py", "import os\nimport torch\nprint('DUOKA_KEY' in os.environ)\n"),
        free_place(),
    )
    words = ["run", "--quiet", "--devices", "cpu:1"]
    first = flow.start([*words, *machine(0, 2, place), script], env=SAME)
    again = [*words, "--timeout", "2", *machine(1, 2, place), script]
    stranger = flow.run(again, env=SAME | {"DUOKA_KEY": "another secret of the tests"})
    assert (stranger.returncode, "it has another key" in stranger.stderr) == (1, True)
    flow.write("key", "a secret of the tests").chmod(0o600)
    flow.run([*words, "--key-file", "key", *machine(1, 2, place), script], env=SAME_HASHES).ok()
    assert first.wait().ok().stdout == "False\n"
