"""The report in a real browser: Debian's chromium, headless."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from duoka.supervision.told import LoggedValue
from duoka.watching.history import Event
from duoka.watching.page import RunEnd, page
from tests.watching.made import record
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
    seen.events.append(Event(4.0, "rank 1 was killed by SIGKILL"))
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
