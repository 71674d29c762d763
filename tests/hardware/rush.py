"""Processes that allocate GPUs of a recorded machine at the same moment, and hold them until told to end.

rush.py RECORDING FOLDER WAIT REQUEST...    one process for each request

Each writes a line `index pid "GPU …"` or `index pid reason`. A line `index` on standard input ends one process; the
end of standard input ends all of them.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from duoka.errors import DeviceError
from duoka.hardware import allocation, locks
from duoka.hardware.allocation import allocate
from duoka.hardware.choice import choose
from duoka.hardware.spec import parse
from tests.hardware.driver import play


def main(recording: str, folder: str, wait: float, requests: list[str]) -> None:
    play(pytest.MonkeyPatch(), recording)
    locks.runtime_folder = lambda: Path(folder)
    allocation.STEP = 0.02
    start, gun = os.pipe()
    gates: dict[int, int] = {}
    for index, request in enumerate(requests):
        behind, gate = os.pipe()
        if os.fork() == 0:
            for other in (gun, gate, *gates.values()):
                os.close(other)
            os.read(start, 1)  # its end is the start
            one(index, request, wait, behind)
            os._exit(0)
        os.close(behind)
        gates[index] = gate
    os.close(gun)
    for line in iter(sys.stdin.readline, ""):
        os.close(gates.pop(int(line)))
    for gate in gates.values():
        os.close(gate)
    for _ in requests:
        os.wait()


def one(index: int, request: str, wait: float, behind: int) -> None:
    signal.alarm(60)
    asked = parse(request)
    try:
        allocation = allocate(
            asked,
            f"run {index}",
            lambda found: choose(asked, found).devices,
            lambda devices: devices,
            wait,
            lambda text: say(index, f"waits {text}"),
        )
    except DeviceError as error:
        say(index, f"refused {error}")
        return
    with allocation.locks:
        say(index, " ".join(map(str, ["has", *allocation.decided])))
        select.select([behind], [], [])
        os.read(behind, 1)


def say(index: int, text: str) -> None:
    os.write(1, f"{index} {os.getpid()} {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
