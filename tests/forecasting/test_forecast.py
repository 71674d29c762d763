from __future__ import annotations

import json
import re
import signal
import time
from html import escape
from typing import Any

import pytest

from duoka.forecasting.forecast import (
    Forecast,
    as_data,
    as_text,
    doubts,
    is_below_ideal,
    page,
    reasons,
    sentences,
    verdict,
)
from duoka.system.messages import in_words
from tests.flows.flow import Flow, Result
from tests.forecasting import scripts
from tests.forecasting.made import forecast, run


def forecast_of(flow: Flow, source: str, *words: str, **how: Any) -> Result:
    flow.write("train.py", source)
    temporary = flow.folder.parent / f"{flow.folder.name}-tmp"
    temporary.mkdir(exist_ok=True)
    result = flow.run(["forecast", *words, "train.py"], env={"TMPDIR": str(temporary)}, timeout=100, **how)
    assert list(temporary.glob("duoka-forecast*")) == []
    assert [path.name for path in flow.folder.iterdir()] == ["train.py"]
    return result


def data(flow: Flow, source: str, *words: str) -> dict[str, Any]:
    """Run with one thread per worker: several would synchronize slowly on a busy machine."""
    result = forecast_of(flow, source, "--json", "--threads", "1", *words).ok()
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_work_that_is_shared_out_is_faster_on_more_devices(flow: Flow) -> None:
    found = data(flow, scripts.SHARED_OUT, "--devices", "cpu:3", "--steps", "10")
    one, two, three = found["sides"]
    assert [run["name"] for run in found["sides"]] == ["cpu:1", "cpu:2", "cpu:3"]
    assert [(run["steps"], run["counted"], run["samples"]) for run in found["sides"]] == [(10, 7, 24)] * 3
    assert one["times_as_fast"] == one["of_the_ideal"] == 1.0
    assert two["times_as_fast"] > 1.3, found
    assert three["step"] < one["step"], found
    assert not found["fastest"] or found["fastest"]["devices"] > 1, found
    assert one["samples_per_second"] == pytest.approx(24 / one["step"])


def test_steps_with_measured_shares_are_timed_when_these_are_known(flow: Flow) -> None:
    found = data(flow, scripts.QUICK, "--devices", "cpu:2", "--steps", "10", "--rows", "auto")
    assert [(run["name"], run["steps"], run["counted"]) for run in found["sides"]] == [
        ("cpu:1", 10, 7),
        ("cpu:2, even rows", 10, 7),
        ("cpu:2, rows as measured", 53, 7),
    ]


def test_work_that_every_rank_does_is_not(flow: Flow) -> None:
    found = data(flow, scripts.CONSTANT, "--devices", "cpu:2", "--steps", "10")
    two = found["sides"][1]
    assert two["times_as_fast"] < 1.3, found
    assert two["waiting"] > 0
    assert any("is work that each rank repeats" in reason for reason in two["reasons"]), found


def test_the_table(flow: Flow) -> None:
    report = flow.folder.parent / "forecast.html"
    words = "--devices", "cpu:2", "--steps", "9", "--report", str(report)
    result = forecast_of(flow, scripts.CONSTANT, *words).ok()
    assert "<h2>Seconds of a step, against devices</h2>" in report.read_text()
    title, _, head, _, *rows = result.stdout.splitlines()
    assert title == "measured on 9 steps of train.py, of which 6 count"
    for column in ("devices", "a step", "samples a second", "times as fast", "of the ideal", "waiting"):
        assert column in head
    assert [row.split("│")[1].strip() for row in rows[:2]] == ["cpu:1", "cpu:2"]
    assert rows[-1].startswith("verdict: ")
    assert "loss" not in result.stdout + result.stderr  # what the script prints
    assert "duoka: cpu:2: 2 CPU workers" in result.stderr
    assert result.stderr.endswith("duoka: running cpu:1\nduoka: running cpu:2\n")


def test_the_verdict_alone_and_what_the_script_prints(flow: Flow) -> None:
    flow.write("train.py", scripts.QUICK)
    words = ["forecast", "--devices", "cpu:2", "--steps", "7", "-q", "--log-dir", "logs", "train.py"]
    result = flow.run(words).ok()
    assert result.stderr == ""
    assert result.stdout.startswith("verdict: ")
    assert result.stdout.count("\n") == 1
    assert (flow.folder / "logs" / "cpu:1" / "rank0.log").read_text().count("loss") == 6  # the seventh step ends it
    assert sorted(path.name for path in (flow.folder / "logs" / "cpu:2").iterdir()) == ["rank0.log", "rank1.log"]


def test_a_script_that_can_be_either_is_plain_and_without_a_loader_samples_are_not_known(flow: Flow) -> None:
    found = data(flow, scripts.EITHER_WITHOUT_LOADER, "--devices", "cpu:2", "--steps", "7")
    assert [run["samples_per_second"] for run in found["sides"]] == [None, None]


def test_a_batch_of_fewer_samples_than_devices(flow: Flow) -> None:
    found = data(flow, scripts.SMALL_BATCH, "--devices", "cpu:3", "--steps", "7")
    reasons = [run["reasons"] for run in found["sides"]]
    small = "a batch of 2 over 3 devices is computed whole by each of them"
    assert [small in some for some in reasons] == [False, False, True], found


def test_what_is_computed_whole_is_told_with_its_line(flow: Flow) -> None:
    found = data(flow, scripts.WHOLE, "--devices", "cpu:2", "--steps", "7")
    one, two = found["sides"]
    assert (one["whole"], one["costliest"]) == (0, None)
    assert two["whole"] > 0
    assert two["costliest"].startswith("sort at train.py:"), found


def test_a_script_that_uses_the_api(flow: Flow) -> None:
    found = data(flow, scripts.API, "--devices", "cpu:2", "--steps", "8")
    assert [run["samples"] for run in found["sides"]] == [24, 24], found
    assert found["sides"][1]["waiting"] > 0


def test_two_optimizers_make_one_step_together(flow: Flow) -> None:
    found = data(flow, scripts.TWO_OPTIMIZERS, "--devices", "cpu:2")
    assert [(run["steps"], run["counted"]) for run in found["sides"]] == [(9, 6)] * 2


def test_a_script_that_ends_early_is_measured_as_far_as_it_goes(flow: Flow) -> None:
    found = data(flow, scripts.SHORT_ENOUGH, "--devices", "cpu:2")
    assert [(run["steps"], run["counted"]) for run in found["sides"]] == [(8, 6)] * 2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            scripts.SHORT,
            "cpu:1: the script ended after 6 steps, too few to tell how long one takes: the first do",
        ),
        (scripts.NO_STEPS, "cpu:1: the script ended without a step of an optimizer of torch.optim in this process"),
        (scripts.FAILS, "duoka: error: cpu:1: the script failed after step 1\n"),
        (scripts.FAILS_ON_TWO, "duoka: error: cpu:2: the script failed after step 1\n"),
        (scripts.KILLED, "duoka: error: cpu:1: the script failed\n"),
    ],
    ids=["short", "no steps", "fails", "fails on two", "killed"],
)
def test_what_cannot_be_forecast(flow: Flow, source: str, said: str) -> None:
    result = forecast_of(flow, source, "--devices", "cpu:2")
    assert result.returncode == 1, result
    assert said in result.stderr, result
    assert result.stdout == ""
    if source == scripts.FAILS:  # the script's own error comes with it
        assert "assert loss.item() < 0, 'too large'" in result.stderr
        assert "\nAssertionError: too large\n" in result.stderr
        assert "src/duoka" not in result.stderr


@pytest.mark.parametrize(
    ("source", "words", "said"),
    [
        (
            scripts.OWN_RANKS,
            ["--devices", "cpu:2"],
            "makes its ranks, and the batch of each, itself (train.py:4",
        ),
        (scripts.QUICK, ["--devices", "cpu:1"], "--devices must be several devices, but is 'cpu:1'; here it is one"),
        (scripts.QUICK, ["--steps", "6"], "--steps must be a whole number from 7 to 100,000, but is 6"),
        (scripts.QUICK, ["--devices", "cpu:2", "--strategy", "single"], "--strategy must be ddp, fsdp, exact"),
        (scripts.QUICK, ["--devices", "cpu:2", "-q", "-v"], "--quiet and --verbose exclude each other"),
    ],
    ids=["own ranks", "one device", "steps", "strategy", "quiet and verbose"],
)
def test_what_cannot_be_asked_for(flow: Flow, source: str, words: list[str], said: str) -> None:
    result = forecast_of(flow, source, *words)
    assert result.returncode == 2, result
    assert said in result.stderr, result


def test_ctrl_c_leaves_nothing_behind(flow: Flow) -> None:
    flow.write("slow.py", scripts.CONSTANT.replace("0.03", "100"))
    temporary = flow.folder / "tmp"
    temporary.mkdir()
    running = flow.start(["forecast", "--devices", "cpu:2", "slow.py"], env={"TMPDIR": str(temporary)})
    deadline = time.monotonic() + 60
    while not list(temporary.glob("duoka-forecast*/*/scratch/files")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 130, result
    assert "duoka: interrupted" in result.stderr
    assert list(temporary.glob("duoka-forecast*")) == []


def test_the_exchange_takes_most_of_the_step() -> None:
    two = run(2, step=0.020, waited=0.014)
    found = forecast(run(1), two)
    assert reasons(found, two) == [
        "14 ms of its 20 ms are waiting for other ranks: the step is too short for the exchange, or the ranks do not "
        "reach it at the same time; use a larger batch, or fewer devices"
    ]


def test_what_weighs_most_comes_first() -> None:
    two = run(2, step=0.030, waited=0.008, repeated=0.015, costliest="sort at train.py:7")
    assert reasons(forecast(run(1), two), two) == [
        "15 ms of its 30 ms go into operations that every rank computes whole, most of it sort at train.py:7",
        "8 ms of its 30 ms are waiting for other ranks: the step is too short for the exchange, or the ranks do not "
        "reach it at the same time; use a larger batch, or fewer devices",
    ]


def test_what_is_left_is_what_each_rank_does_by_itself() -> None:
    two = run(2, step=0.011, waited=0.0005)
    (only,) = reasons(forecast(run(1), two), two)
    assert only.startswith("5.5 ms more than its share of one device's step is work that each rank repeats")


def test_cores_that_one_worker_has_already() -> None:
    two = run(2, step=0.009, waited=0.0039, threads=4)
    first, *_ = reasons(forecast(run(1, threads=8), two, cores=8), two)
    assert first == "one worker by itself computes on 8 cores already, and 2 have 8 together"


def test_a_batch_that_cannot_be_shared_out() -> None:
    sixteen = run(16, "cuda", samples=8, step=0.012)
    assert reasons(forecast(run(1, "cuda", samples=8), sixteen), sixteen) == [
        "a batch of 8 over 16 devices is computed whole by each of them"
    ]


def test_of_a_gpu_it_is_not_said_what_is_waited_for() -> None:
    two = run(2, "cuda", step=0.020, waited=0.014)
    assert two.waited is None
    assert reasons(forecast(run(1, "cuda"), two), two) == []


def test_nothing_is_lost() -> None:
    two = run(2, step=0.005, waited=0.001)
    found = forecast(run(1), two)
    assert reasons(found, two) == []
    assert not is_below_ideal(found, two)


def test_of_which_it_is_said_why() -> None:
    runs = [run(1), run(2, step=0.0055), run(4, step=0.004), run(8, step=0.0041)]
    found = forecast(*runs)
    assert [is_below_ideal(found, one) for one in runs] == [False, False, True, True]


@pytest.mark.parametrize(
    ("seconds", "words"), [(12.34, "12.3 s"), (0.0123, "12.3 ms"), (0.00012, "120 µs"), (0.0000456, "45.6 µs")]
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


PAYS = forecast(run(1), run(2, step=0.0055), run(4, step=0.004), run(8, step=0.0041))
DOES_NOT = forecast(run(1), run(2, step=0.020, waited=0.014))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (PAYS, "cpu:4 is the fastest here, 2.50 times as fast as cpu:1, 62% of the ideal"),
        (DOES_NOT, "cpu:1 is the fastest here; more devices do not make this script faster"),
        (forecast(run(1), run(2, step=0.0097)), "cpu:1 is the fastest here; more"),
        (
            forecast(run(1), run(2, step=0.002)),
            "none to be trusted: cpu:2 was 5.00 times as fast as cpu:1, more",
        ),
    ],
    ids=["pays", "does not", "too little", "too much"],
)
def test_the_verdict(found: Forecast, said: str) -> None:
    assert verdict(found).startswith(said)


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ((0.009, 0.009, 0.010, 0.010, 0.010), (0.006, 0.006, 0.009, 0.0095, 0.0095), "on cpu:2 and on cpu:1 overlap"),
        ((0.010,) * 5, (0.002, 0.004, 0.006, 0.008, 0.010), "the steps of cpu:2 are not alike (the middle half is 4"),
        ((0.010,) * 5, (0.006,) * 5, ""),
    ],
    ids=["overlap", "not alike", "none"],
)
def test_doubts(one: tuple[float, ...], two: tuple[float, ...], said: str) -> None:
    found = forecast(run(1, windows=one), run(2, windows=two))
    assert found.best.devices == 2
    assert said in "".join(doubts(found))
    assert list(doubts(found)) == json.loads(as_data(found))["notes"]
    assert as_text(found, "normal").count("note: ") == bool(said)


def test_sentences_are_there_where_more_are_not_faster() -> None:
    lines = as_text(PAYS, "normal").splitlines()
    assert [line for line in lines if line.startswith("cpu:")] == [
        "cpu:4: faster than cpu:1, but 62% of the ideal",
        "cpu:8: no faster than cpu:4",
    ]
    assert "cpu:2: slower than cpu:1, 2.00 times its time" in as_text(DOES_NOT, "normal")
    assert "\ncpu:2: " in as_text(PAYS, "verbose")
    assert as_text(PAYS, "quiet") == f"verdict: {verdict(PAYS)}"


def test_of_a_gpu_waiting_is_not_seen() -> None:
    text = as_text(forecast(run(1, "cuda"), run(2, "cuda", step=0.006)), "normal")
    assert text.count("not seen") == 1


def test_what_cannot_be_is_not_called_the_fastest() -> None:
    assert json.loads(as_data(forecast(run(1), run(2, step=0.002))))["fastest"] is None


def test_data() -> None:
    data = json.loads(as_data(DOES_NOT))
    assert data["fastest"] == {"name": "cpu:1", "devices": 1}
    two = data["sides"][1]
    assert (two["step"], two["waiting"], two["times_as_fast"], two["of_the_ideal"]) == (0.02, 0.014, 0.5, 0.25)
    assert two["samples_per_second"] == 64 / 0.02
    assert two["devices"] == ["CPU", "CPU"]


FOUND = forecast(run(1), run(2, step=0.0075, waited=0.0025), run(4, step=0.005), run(6, step=0.005))


def drawn(text: str, title: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each line of a chart, as fractions of its width and height from below."""
    figure = text.split(f"<h2>{title}</h2>")[1].split("</figure>")[0]
    names = re.findall(r'<i class="c\d"></i>(.*?)</span>', figure)
    paths = re.findall(r'class="line c\d" d="([^"]*)"', figure)
    places = [re.findall(r"[ML]([\d.]+) (-?[\d.]+)", path) for path in paths]
    return {
        name: [(float(x) / 1000, 1 - float(y) / 240) for x, y in place]
        for name, place in zip(names, places, strict=True)
    }


def test_time_and_ideal_against_devices() -> None:
    text = page(FOUND)
    lines = drawn(text, "Seconds of a step, against devices")
    heights = [height for _, height in lines["measured"]]
    assert heights == pytest.approx([1, 0.75, 0.5, 0.5], abs=1e-3)
    places, ideal = zip(*lines["ideal: that of one device, divided by their number"], strict=True)
    assert places == pytest.approx([0, 1 / 2.585, 2 / 2.585, 1], abs=1e-3)  # a doubling is as wide as another
    assert ideal == pytest.approx([1, 1 / 2, 1 / 4, 1 / 6], abs=1e-3)
    assert re.findall(r"translateX[^>]*>(cpu:\d)", text)[:4] == ["cpu:1", "cpu:2", "cpu:4", "cpu:6"]


def test_the_page_says_what_the_terminal_says() -> None:
    text = page(FOUND)
    assert "<h1>train.py: cpu:4 is the fastest here, 2.00 times as fast as cpu:1" in text
    said = [escape(line.strip()) for line in sentences(FOUND, False)]
    assert said
    assert all(f"<li>{line}</li>" in text for line in said)
    assert text.count("<tr>") == 5


@pytest.mark.parametrize("found", [FOUND, forecast(run(1, samples=None), run(2, samples=None))])
def test_samples_are_drawn_if_they_are_known(found: Forecast) -> None:
    assert ("<h2>Samples a second</h2>" in page(found)) is (found is FOUND)
