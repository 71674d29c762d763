"""Two machines with a network between them: namespaces of this one, which only root can make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flows.flow import surroundings
from tests.flows.group import until
from tests.flows.test_machines import PLAIN

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip"),
]

NAMES = [f"duoka-{os.getpid()}-{number}" for number in range(2)]
DEVICES = [f"dk{number}x{os.getpid() % 10**6}" for number in range(2)]
AS_HOST = 'mount --bind resolv.conf /etc/resolv.conf; hostname $0; exec "$@" 2> $0.txt'
MEET = "10.213.77.1:29500"


ENDLESS = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    net(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    open("going", "w").close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            DEVICES[0],
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "name",
            DEVICES[1],
            "netns",
            NAMES[1],
        )
        for number, (name, device) in enumerate(zip(NAMES, DEVICES, strict=True), 1):
            ip("-n", name, "address", "add", f"10.213.77.{number}/24", "dev", device)
            for one in ("lo", device):
                ip("-n", name, "link", "set", one, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def start(network: None, tmp_path: Path) -> Callable[[str], list[subprocess.Popen[str]]]:
    """A command on each of two machines, whose host names lead nowhere."""

    def start(source: str) -> list[subprocess.Popen[str]]:
        (tmp_path / "train.py").write_text(source)
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        command = f"duoka run -q --devices cpu:1 --machines 2 --rendezvous {MEET} --machine"
        words = [sys.executable, "-m", *command.split()]
        return [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "unshare",
                    "--uts",
                    "--mount",
                    "sh",
                    "-c",
                    AS_HOST,
                    name,
                    *words,
                    str(number),
                    "train.py",
                ],
                cwd=tmp_path,
                env=surroundings({"PYTHONHASHSEED": "0"}),
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, name in enumerate(NAMES)
        ]

    return start


def test_gloo_takes_the_network_that_leads_to_the_other_machine(
    start: Callable[[str], list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    running = start(PLAIN)
    said = [one.communicate()[0] for one in running]
    assert [one.returncode for one in running] == [0, 0], [path.read_text() for path in tmp_path.glob("*.txt")]
    (tmp_path / "losses.txt").unlink()
    alone = [sys.executable, "train.py"]
    env = surroundings({"PYTHONHASHSEED": "0"})
    expected = subprocess.run(alone, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert said == [expected.stdout, ""]


SILENT = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("ready", flush=True)
while True:
    print(server.recv(512), flush=True)
"""


def test_no_name_server_is_asked(start: Callable[[str], list[subprocess.Popen[str]]], tmp_path: Path) -> None:
    """One that does not answer would delay each start by some seconds, again and again."""
    words = [["ip", "netns", "exec", name, sys.executable, "-c", SILENT] for name in NAMES]
    servers = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in words]
    try:
        assert [server.stdout and server.stdout.readline() for server in servers] == ["ready\n"] * 2
        for one in start(PLAIN):
            one.communicate()
            assert one.returncode == 0, [path.read_text() for path in tmp_path.glob("*.txt")]
    finally:
        for server in servers:
            server.kill()
    assert [server.communicate()[0] for server in servers] == ["", ""]


def test_a_machine_whose_network_goes_is_lost(
    start: Callable[[str], list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    running = start(ENDLESS)
    until((tmp_path / "going").exists, 60)
    ip("-n", NAMES[1], "link", "set", DEVICES[1], "down")
    for one in running:
        one.communicate(timeout=60)
        assert one.returncode == 1
    for number in range(2):
        told = (tmp_path / f"{NAMES[number]}.txt").read_text()
        assert f"duoka: machine {1 - number} ({NAMES[1 - number]}) is gone: " in told
