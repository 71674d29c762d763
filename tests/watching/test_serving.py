from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from duoka.devices.gpu import Gpu
from duoka.watching.record import FollowedRun, PublishedRun, published_runs
from duoka.watching.serving import WatchedRun, serving
from tests.launchers.made import plan


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def test_only_the_secret_opens_the_page() -> None:
    with serving(lambda: "the page") as address:
        assert address.startswith("http://127.0.0.1:")
        assert fetched(address) == "the page"
        base, _, token = address.partition("?token=")
        for wrong in (base, f"{base}?token=", f"{base}?token={token}x", f"{base}{token}", f"{base}?token=%ff"):
            with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                fetched(wrong)
            refused.value.close()
    with pytest.raises(urllib.error.URLError):
        fetched(address)


def test_the_page_follows_the_run_and_outlives_it(tmp_path: Path) -> None:
    run = PublishedRun(plan(), tmp_path)
    board = run.begin(0, range(2))
    run.started([os.getpid()] * 2)
    (record,) = published_runs(tmp_path)
    watched = WatchedRun(record)
    board.slot(0).step(1)
    board.slot(0).load(0, 0, 3, 8)
    board.script_output.log(1, {"loss": 0.5})
    cards = {name: Gpu(0, "GPU-0", "H200", 140 << 30, 1 << 30, 50) for name in (record.devices[0], "GPU 7")}
    watched.look(record, cards)
    text = watched.page()
    assert "train.py: runs</h1>" in text
    assert f"{record.devices[0]}</span></div></figcaption>" in text.split("<h2>Use of each GPU</h2>")[1]
    assert "GPU 7" not in text  # another run's
    assert '<meta http-equiv="refresh" content="1">' in text
    assert "<h2>loss</h2>" in text
    assert " · batch 3 of 8" in text

    run.failed("rank 1 was killed", "duoka: rank 1 ended by SIGKILL")
    run.begin(1, range(2))
    run.started([os.getpid()] * 2)
    (record,) = published_runs(tmp_path)
    watched.look(record)
    text = watched.page()
    assert "rank 1 was killed</summary><pre>duoka: rank 1 ended by SIGKILL</pre>" in text

    followed = FollowedRun(record, tmp_path)
    run.failed("rank 0 hung", "its stacks")
    run.ended(1)
    run.close()
    assert list(published_runs(tmp_path)) == []
    watched.end(followed.read())
    text = watched.page()
    assert "train.py: ended with exit code 1</h1>" in text
    assert "rank 0 hung</summary><pre>its stacks</pre>" in text
    assert "refresh" not in text
