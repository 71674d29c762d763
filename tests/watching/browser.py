"""A real browser, Debian's chromium without a window, driven over a pipe (its devtools protocol)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

LIMIT = 60.0  # seconds for anything


class Browser:
    """One page. requests: addresses that it asked for. said: console messages, errors among them."""

    def __init__(self, folder: Path, *words: str) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.skip("there is no chromium")
        self.requests: list[str] = []
        self.said: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._count, self._rest, self._session = 0, b"", ""
        theirs, self._write = os.pipe()
        self._read, out = os.pipe()

        def as_three_and_four() -> None:
            one, other = os.dup(theirs), os.dup(out)  # either may be 3 or 4 already
            os.dup2(one, 3)
            os.dup2(other, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder / 'profile'}",
                *words,
            ],
            preexec_fn=as_three_and_four,
            pass_fds=(3, 4),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(out)

    def open(self, address: str) -> None:
        """Open a page."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Log", "Runtime", "Page"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page; None while another one loads."""
        return (
            self._call("Runtime.evaluate", expression=expression, returnByValue=True).get("result", {}).get("value")
        )

    def until(self, expression: str, text: str) -> str:
        """Wait until the text that an expression gives contains another one, and return it."""
        begun, found = time.monotonic(), ""
        while time.monotonic() - begun < LIMIT:
            found = self.value(expression) or ""
            if text in found:
                return found
            time.sleep(0.05)
        raise AssertionError(found)

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        os.close(self._read)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while self._count not in self._answers:
            assert select.select([self._read], [], [], LIMIT)[0], method
            self._take(os.read(self._read, 1 << 20))
        answer = self._answers.pop(self._count)
        found: dict[str, Any] = answer.get("result", {})
        return found

    def _take(self, data: bytes) -> None:
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Log.entryAdded":
                self.said.append(message["params"]["entry"]["text"])
            elif message["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.said.append(str(message["params"]))
