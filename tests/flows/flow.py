"""Runs of `duoka ...` and of `python script.py`, forked from one warm process: see `tests.flows.warm`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]
FROM_OUTSIDE = (
    "PYTEST_",
    "CUDA_",
    "ASCEND_",
    "OMP_",
    "TORCHELASTIC_",
    "MASTER_",
    "PYTORCH_NVML_",
)  # what a run must not depend on
# On a default device torch's loaders cannot shuffle: their generator is the CPU's, and `randperm` asks for the card.
ON_CARDS = (
    "import torch; torch.set_default_device('cuda'); made = torch.utils._device._device_constructors();"
    " made.difference_update([one for one in made if one.__name__ == 'randperm']); del made"
)
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
CPUS = re.compile(r"cpu:(\d+)")
SIMULATED = {"SIMULATED_COUNTS", "SIMULATED_FAULT", "SIMULATED_MEMORY"}  # what real cards do not tell, or do


@dataclass(frozen=True)
class Result:
    """What a run came to. returncode: as the shell sees it, 128 + n for death by signal n."""

    returncode: int
    stdout: str
    stderr: str

    def ok(self) -> Result:
        """The result itself, if the run ended well."""
        assert self.returncode == 0, self
        return self

    def __str__(self) -> str:
        return f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Running:
    """A run that is going on. pid: of the command process."""

    def __init__(self, pid: int, report: IO[str], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self._report, self._stdout, self._stderr = report, stdout, stderr

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command process."""
        os.kill(self.pid, number)

    def stdout(self) -> str:
        """What it has written so far."""
        return self._text(self._stdout)

    def stderr(self) -> str:
        """What it has written so far."""
        return self._text(self._stderr)

    def wait(self, leaves_nothing: bool = True) -> Result:
        """Wait for the end, and check that it came in time and that no process is left behind."""
        with self._report, self._stdout, self._stderr:
            end = json.loads(self._report.readline())
            result = Result(end["returncode"], self.stdout(), self.stderr())
        assert not end["timed_out"], f"not over in time\n{result}"
        if leaves_nothing:
            assert not end["left_behind"], f"left behind: {end['left_behind']}\n{result}"
        return result

    @staticmethod
    def _text(file: IO[bytes]) -> str:
        said = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
        return without_noise(said)


def without_noise(said: str) -> str:
    """Without what torch's libraries say of themselves, in some versions.

    triton, at the end of a python: what it has not taken down; CUDA builds of torch 2.15 import it. Python 3.10, of a
    script's own exceptions: their module.
    """
    said = re.sub(r"(?m)^__main__\.", "", said)
    return re.sub(r"(?m)^(?:nanobind: | - leaked | - \.\.\. skipped|See https://nanobind).*\n?", "", said)


class WarmServer:
    """A warm process, one for all workers of pytest-xdist. path: of its socket. words: for `tests.flows.warm`."""

    def __init__(self, *words: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="duoka-tests-")  # a socket's path may not be long
        self.path = f"{self._folder.name}/warm"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.path)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, ROOT / "tests/flows/warm.py", str(listener.fileno()), *words],
                cwd=ROOT,
                env=surroundings({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )

    def close(self) -> None:
        """End the warm process, and with it whatever is still going on."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class Warm:
    """The warm process, seen from the tests. temporary: for the temporary files and logs of its runs."""

    def __init__(self, path: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="duoka-tests-")
        self.temporary = self._temporary.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)

    def start(
        self, program: str, args: Sequence[str | Path], stdin: IO[Any], output: IO[bytes] | None, **request: Any
    ) -> Running:
        """Fork one run. output: what its standard output is to be; None: a file, for `Running` to read."""
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        reading, writing = os.pipe()
        data = json.dumps({"program": program, "args": [str(arg) for arg in args], **request}).encode()
        files = [stdin.fileno(), (output or stdout).fileno(), stderr.fileno(), writing]
        socket.send_fds(self._socket, [data], files)
        os.close(writing)
        report = open(reading)  # noqa: SIM115
        begun = report.readline()
        assert begun, "the warm process has ended; standard error tells why"
        return Running(json.loads(begun)["pid"], report, stdout, stderr)

    def close(self) -> None:
        """Close the connection to it."""
        self._socket.close()
        self._temporary.cleanup()


@dataclass(frozen=True)
class Flow:
    """Runs in a folder of the test's own.

    cards: variables of processes that have simulated cards; `--devices cpu:2` then is `--devices 0,1`.
    """

    warm: Warm
    folder: Path
    cards: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, source: str) -> Path:
        """Write a script into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(self.named(source)))
        return path

    def named(self, text: str) -> str:
        """A text that speaks of cuda, as the cards of these runs are called."""
        kind = self.cards.get("SIMULATED_DEVICE", "cuda")
        return text.replace("CUDA_VISIBLE_DEVICES", VISIBLE.get(kind, "")).replace("cuda", kind)

    def alone(self, folder: Path) -> Flow:
        """Runs in another folder, and on one card where there are cards: what runs on two are compared with."""
        return Flow(self.warm, folder, {**self.cards, self.named("CUDA_VISIBLE_DEVICES"): "0"} if self.cards else {})

    def script(self, path: Path) -> Path:
        """A script that names no device; on cards, a copy whose tensors are on a card."""
        if not self.cards:
            return path
        return self.write(path.name, path.read_text().replace("\nimport torch\n", f"\n{ON_CARDS}\n", 1))

    def run(self, args: Sequence[str | Path], **how: Any) -> Result:
        """`duoka ...`, to its end. Takes what `start` takes."""
        return self.start(args, **how).wait()

    def python(self, args: Sequence[str | Path], **how: Any) -> Result:
        """`python script.py ...`, to its end: what a run is compared with. Takes what `start` takes."""
        return self.start(args, program="python", **how).wait()

    def start(
        self,
        args: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        grace: float = 5,
        stdin: str = "",
        program: str = "duoka",
        prepare: str = "",
        stdout: IO[bytes] | None = None,
    ) -> Running:
        """Start a run, and go on.

        Args:
            args: the words after the program's name.
            cwd: where it runs; the test's folder if not given.
            env: variables beside those of this process.
            timeout: seconds after which it is killed, and `wait` fails.
            grace: seconds after its end in which what it started must be gone, too.
            stdin: what it can read.
            program: duoka or python.
            prepare: Python that the new process runs before it becomes the program, as to limit its open files.
            stdout: where it writes, such as a pipe; a file of its own if not given.
        """
        with tempfile.TemporaryFile("w+") as file:
            file.write(stdin)
            file.seek(0)
            cwd = cwd or self.folder
            limits = {"timeout": timeout, "grace": grace}
            if self.cards and "SIMULATED_CARDS" not in self.cards and env and SIMULATED & env.keys():
                pytest.skip("needs simulated cards")
            env = surroundings({"TMPDIR": self.warm.temporary, **self.cards} | dict(env or {}))
            if self.cards:
                args = [CPUS.sub(_as_cards, str(arg)) for arg in args]
            return self.warm.start(program, args, file, stdout, cwd=str(cwd), env=env, prepare=prepare, **limits)


def _as_cards(found: re.Match[str]) -> str:
    return ",".join(map(str, range(int(found[1])))) + "," * (found[1] == "1")


def surroundings(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a run: `env`, and this process's but for what could make a difference."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OUTSIDE)}
    kept = {name: value for name, value in kept.items() if name not in ranks}
    return kept | {"OMP_WAIT_POLICY": "PASSIVE"} | dict(env)  # threads of torch that wait do not poll
