"""`run.checkpoint`: runs that are killed, or asked to end, go on at the very batch on another number of ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import duoka
from tests.flows.flow import Flow, Result, Warm
from tests.flows.group import until
from tests.flows.reference import Reference
from tests.flows.test_restarts import children
from tests.run.ranks import on_ranks

SCRIPT = Path(__file__).parent / "scripts" / "resumed.py"


@pytest.fixture(scope="module")
def uninterrupted(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run on one device that nothing happens to."""
    return Reference(Flow(warm, tmp_path_factory.mktemp("uninterrupted")), [SCRIPT, "weights.pt", "0"], "weights.pt")


def on(workers: int, *args: Any) -> list[str | Path]:
    return ["run", "--quiet", "--devices", f"cpu:{workers}", SCRIPT, "weights.pt", *map(str, args)]


def assert_it_went_on(flow: Flow, before: str, after: str, uninterrupted: Reference) -> None:
    """Every line is that of the run that nothing happened to; at most the last steps are done again."""
    first, second = before.splitlines(), after.splitlines()
    begun = len(uninterrupted.stdout.splitlines()) - len(second)
    assert len(first) - 2 <= begun <= len(first)
    assert begun % 6 != 0, "this was to be in the middle of an epoch"
    uninterrupted.assert_same("\n".join(first), part=lines(0, len(first)))
    uninterrupted.assert_same("\n".join(second), flow.folder / "weights.pt", lines(begun))


def lines(begin: int, end: int | None = None) -> Callable[[str], str]:
    return lambda text: "\n".join(text.splitlines()[begin:end])


@pytest.mark.parametrize("then", [1, 3])
def test_a_killed_run_goes_on_at_the_very_batch(flow: Flow, then: int, uninterrupted: Reference) -> None:
    killed = flow.run(on(2, 0, 9))
    assert killed.returncode != 0
    again = flow.run(on(then, 0)).ok()
    assert_it_went_on(flow, killed.stdout, again.stdout, uninterrupted)


def test_a_run_that_is_asked_to_end_goes_on(flow: Flow, uninterrupted: Reference) -> None:
    running = flow.start(on(3, 0.15))
    until(lambda: "\n1 7 " in running.stdout())
    running.send(signal.SIGTERM)
    ended = running.wait()
    assert ended.returncode == 75, ended
    again = flow.run(on(2, 0)).ok()
    assert_it_went_on(flow, ended.stdout, again.stdout, uninterrupted)


def killed_and_restarted(flow: Flow, workers: int, victim: int, seconds: float) -> Result:
    """A run of which a rank is killed so many seconds after its first step, and that goes on by itself."""
    words = ["run", "--quiet", "--restarts", "1", *on(workers, 0.03)[2:]]
    running = flow.start(words)
    until(lambda: "\n" in running.stdout())
    time.sleep(seconds)
    os.kill(children(running.pid)[victim], signal.SIGKILL)
    return running.wait().ok()


def assert_it_is_as_if_nothing_had_happened(flow: Flow, result: Result, uninterrupted: Reference) -> int:
    """Returns the step from which it went on: 0, where it was killed before anything was saved."""
    words = r"restart 1 of 1(?:, from the checkpoint of step (\d+),)? after: rank \d was killed"
    told = re.search(words, result.stderr)
    assert told, result
    seen, whole = result.stdout.splitlines(), uninterrupted.stdout.splitlines()
    said = int(told[1] or 0)  # rank 0 may be killed after it has saved the next step and before it says so
    begins = [step for step in (said, said + 1) if seen[step - len(whole)].split()[:2] == whole[step].split()[:2]]
    step = begins[0]
    again = len(whole) - step
    first, second = seen[: len(seen) - again], seen[len(seen) - again :]
    assert step <= len(first) <= step + 2  # at most the last steps are done again
    uninterrupted.assert_same("\n".join(first), part=lines(0, len(first)))
    uninterrupted.assert_same("\n".join(second), flow.folder / "weights.pt", lines(step))
    return step


@pytest.mark.parametrize(("workers", "victim", "seconds"), [(2, 1, 0.3), (3, 0, 0.15)])
def test_a_killed_rank_is_started_again_and_the_run_goes_on_at_the_very_batch(
    workers: int, victim: int, seconds: float, flow: Flow, uninterrupted: Reference
) -> None:
    result = killed_and_restarted(flow, workers, victim, seconds)
    assert_it_is_as_if_nothing_had_happened(flow, result, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_thirty_of_thirty_come_to_the_same_end(
    workers: int, flow: Flow, uninterrupted: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    random, steps = Random(workers), []
    for _ in range(30):
        result = killed_and_restarted(flow, workers, random.randrange(workers), random.uniform(0, 0.45))
        steps.append(assert_it_is_as_if_nothing_had_happened(flow, result, uninterrupted))
        shutil.rmtree(flow.folder / "out")
        (flow.folder / "weights.pt").unlink()
    with capsys.disabled():
        print(f" [30 of 30 runs of {workers} workers went on, from steps {sorted(steps)}]", end="")


def test_a_run_that_ended_between_two_epochs_counts_no_step_twice(tmp_path: Path) -> None:
    def steps(ends: bool) -> list[tuple[int, int]]:
        with duoka.start(seed=0) as run:
            train = run.loader((torch.arange(6.0),), batch_size=2)
            saved = run.checkpoint(tmp_path / "out", loader=train, every_steps=1)
            seen = []
            for epoch in saved.epochs(2):
                seen += [(epoch, saved.step_number) for _ in train]
                if ends:
                    break  # its last step is saved, its end is not
            return [*seen, (2, saved.step_number)]

    assert steps(ends=True) == [(0, 0), (0, 1), (0, 2), (2, 3)]
    assert steps(ends=False) == [(1, 3), (1, 4), (1, 5), (2, 6)]


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    def begin() -> Any:
        steps = []
        for _ in range(2):
            with duoka.start(seed=0) as run:
                saved = run.checkpoint(tmp_path / "out", model=run.model(nn.Linear(2, 2)), best="max", keep=1)
                for epoch in saved.epochs(len(steps) + 1):
                    saved.metric = float(epoch)
                steps.append(saved.step_number)  # the next run may write there
        return steps

    assert duoka.launch(begin, devices="cpu:2") == [[1, 2]] * 2


def test_what_cannot_be_saved_is_said_by_every_rank(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        said = []
        states: list[dict[str, Any]] = [{}, {"random": 1}, {"model": nn.Linear(1, 1), "keep": 0}, {"odd": object()}]
        for number, how in enumerate(states):
            with pytest.raises(duoka.DuokaError) as error:
                run.checkpoint(tmp_path / str(number), **how).save()
            said.append(str(error.value))
        return said

    for nothing, named, kept, odd in on_ranks(2, work):
        assert "given what to save" in nothing
        assert "'random'" in named
        assert "keep" in kept
        assert "odd" in odd


def test_a_model_that_does_not_fit_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def save(run: duoka.Run) -> None:
        run.checkpoint(tmp_path, model=run.model(nn.Linear(3, 2))).save()

    def restore(run: duoka.Run) -> str:
        with pytest.raises(duoka.DuokaError) as error:
            run.checkpoint(tmp_path, model=run.model(nn.Linear(4, 2))).restore()
        return str(error.value)

    on_ranks(2, save)
    assert all("weight" in text for text in on_ranks(2, restore))


def test_values_and_tensors_of_the_script(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        total = torch.zeros(2)
        saved = run.checkpoint(tmp_path, total=total, smallest=9.0)
        saved.restore()
        saved.values["smallest"] -= 1
        total += 1
        saved.save()
        saved.wait()
        return saved.values["smallest"], total.tolist()

    assert on_ranks(3, work) == [(8.0, [1.0, 1.0])] * 3
    assert on_ranks(1, work) == [(7.0, [2.0, 2.0])]
