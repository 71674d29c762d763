"""The report in a real browser: Debian's chromium, headless."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from duoka.supervision.rings import LoggedValue
from duoka.watching.history import History, RunEvent
from duoka.watching.page import RunEnd, page
from duoka.watching.record import published_runs
from tests.flows.flow import Flow, Running
from tests.watching.browser import Browser
from tests.watching.made import record, sample
from tests.watching.test_page import history

pytestmark = pytest.mark.long

# Shows the report in a frame, as it allows no script itself.
AROUND = """<!DOCTYPE html><iframe id="frame" style="width:360px;height:800px;border:0" src="report.html"></iframe>
<script>
onload = () => {
  const page = document.getElementById("frame").contentDocument;
  document.body.textContent = JSON.stringify({
    wide: page.documentElement.scrollWidth,
    back: getComputedStyle(page.body).backgroundColor,
    length: page.querySelector(".line.c1").getTotalLength(),
    drawn: page.querySelectorAll("svg path").length,
    smallest: Math.min(...[...page.querySelectorAll("span,p,td,h2")].map((one) => parseFloat(getComputedStyle(one).fontSize))),
  });
};
</script>"""  # noqa: E501


@pytest.mark.parametrize(("scheme", "back"), [("1", "rgb(255, 255, 255)"), ("0", "rgb(20, 23, 26)")])
def test_the_report_at_360_pixels(tmp_path: Path, scheme: str, back: str) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium")
    seen = history()
    seen.events.append(RunEvent(4.0, "rank 1 was killed by SIGKILL"))
    seen.log([LoggedValue(5.0, "loss", number, 1.0 / number) for number in range(1, 9)])
    (tmp_path / "report.html").write_text(page(record(name="a-long-name/" * 9), seen, RunEnd(0, 10.0)))
    (tmp_path / "around.html").write_text(AROUND)
    found, said = looked_at(browser, tmp_path, scheme)
    assert found["wide"] <= 360
    assert found["back"] == back
    assert found["length"] == pytest.approx(900, abs=1)  # a flat line from 1 s to 10 s of 10 s, 1,000 wide
    assert found["drawn"] == 4 * (5 + 1) + 3 + 5 + 2 + 1  # grids and marks; lines and areas
    assert found["smallest"] >= 13
    assert "CONSOLE" not in said


def looked_at(browser: str, folder: Path, scheme: str) -> tuple[dict[str, Any], str]:
    """What the page around the report has measured, and what the browser said."""
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    words += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    done = subprocess.run(
        [browser, *words, "--virtual-time-budget=5000", "--dump-dom", (folder / "around.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    match = re.search(r"<body>(\{.*?\})</body>", done.stdout)
    assert match is not None, done
    return json.loads(match[1]), done.stderr


TRAINING = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
for epoch in range(1_000_000):
    for (x,) in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
    print("loss", loss.item(), flush=True)
"""
TEXT = "document.body.innerText"


def watched(flow: Flow, run: Running) -> tuple[Running, str]:
    """A page about a run, and its address."""
    watching = flow.start(["watch", "--page", str(run.pid)])
    while "\n" not in watching.stdout():
        time.sleep(0.05)
    return watching, watching.stdout().splitlines()[0]


def test_two_runs_at_once_of_which_one_loses_a_rank(flow: Flow, tmp_path: Path) -> None:
    script = flow.write("train.py", TRAINING)
    runs = [flow.start(["run", "--quiet", "--devices", "cpu:2", script]) for _ in range(2)]
    while not all(run.stdout().count("loss") > 2 for run in runs):
        time.sleep(0.05)
    pages = [watched(flow, run) for run in runs]
    browsers = [Browser(tmp_path / str(number)) for number in range(2)]
    try:
        for browser, (_, address) in zip(browsers, pages, strict=True):
            browser.open(address)
            text = browser.until(TEXT, "loss")
            assert "train.py: runs" in text
            assert "waits for other ranks" in text
            assert "of 1000000" in text.replace(",", "")
            browser.until("String(document.querySelectorAll('svg path.line').length >= 3)", "true")
        (record,) = (record for record in published_runs() if record.pid == runs[0].pid)
        begun = time.monotonic()
        os.kill(record.pids[1], signal.SIGKILL)
        text = browsers[0].until(TEXT, "rank 1 was killed by SIGKILL")
        print(f"the page showed it after {time.monotonic() - begun:.2f} s")
        browsers[0].until(TEXT, "train.py: ended with exit code 137")
        browsers[0].until(TEXT, "duoka: rank 1 of 2 ended by SIGKILL")
        assert runs[0].wait().returncode == 137
        browsers[1].until(TEXT, "train.py: runs")
        for browser, (_, address) in zip(browsers, pages, strict=True):
            here = address.partition("?")[0]
            assert browser.requests
            assert all(request.startswith((here, "data:")) for request in browser.requests)
            assert browser.said == []
            browser.until("String(document.documentElement.scrollWidth <= window.innerWidth)", "true")
    finally:
        for browser in browsers:
            browser.close()
        for one in (runs[1], *(watching for watching, _ in pages)):
            one.send(signal.SIGTERM)
            one.wait()


def test_a_thousand_ranks_the_worst_first(tmp_path: Path) -> None:
    """Rank 617 waits for nobody, rank 41 did not come to a collective, and nothing is heard of rank 999."""
    seen = History(0.0)
    seen.begin()
    for second in range(40):
        usual = {"steps": second, "waited": second * 0.5, "ran": second * 0.5, "memory": 1 << 30}
        ranks = [usual | {"inside": "all_reduce", "since": 9.0} for _ in range(1_000)]
        ranks[617] |= {"waited": 0.0}
        ranks[41] |= {"inside": ""}
        ranks[999] |= {"received": 1.0}
        seen.add(sample(float(second), *ranks))
    begun = time.monotonic()
    text = page(record(1_000), seen, RunEnd(None, 40.0, "runs"))
    made = time.monotonic()
    (tmp_path / "report.html").write_text(text)
    browser = Browser(tmp_path)
    try:
        browser.open((tmp_path / "report.html").as_uri())
        browser.until("document.readyState", "complete")
        rows = "[...document.querySelectorAll('tr')].slice(1, 5).map((row) => row.cells[0].innerText).join(' ')"
        assert browser.value(rows) == "999 41 617 0"
        drawn = browser.value("performance.getEntriesByType('navigation')[0].loadEventEnd")
        print(f"written in {made - begun:.3f} s, {len(text) // 1000} kB; loaded in {drawn / 1000:.3f} s")
    finally:
        browser.close()
