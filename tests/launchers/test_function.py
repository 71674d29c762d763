"""duoka.launch, in a process of its own each time: closures, results, errors, ends."""

from __future__ import annotations

import signal

import pytest

from tests.flows.flow import Flow
from tests.flows.group import until


def test_closures_lambdas_and_results(flow: Flow) -> None:
    script = flow.write(
        "train.py",
        """
        import os
        import torch
        import duoka

        here, offset = os.getpid(), 10
        unpicklable = lambda x: x + offset

        def train(scale, *, more):
            run = duoka.start(seed=0)
            layer = run.model(torch.nn.Linear(2, 1))
            batch = next(iter(run.loader(torch.arange(8.0).view(4, 2), batch_size=4)))[0]
            layer(batch).sum().backward()
            return run.rank, unpicklable(scale) + more, layer.weight.grad.tolist(), os.getpid() != here

        big = torch.randn(600, 600)
        (big @ big).sum()  # torch's threads are up: a fork without them must not wait for them
        print(duoka.launch(train, 2, devices="cpu:2", more=0.5))
        product = lambda: (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()
        print(duoka.launch(product, devices="cpu", threads=2), product() == 300.0**3)
        """,
    )
    result = flow.python([script]).ok()
    grad = [[12.0, 16.0]]
    expected = [(0, 12.5, grad, True), (1, 12.5, grad, True)]
    assert result.stdout.splitlines() == [str(expected), f"{[300.0**3]} True"]


def test_the_first_error_comes_with_its_traceback(flow: Flow) -> None:
    script = flow.write(
        "train.py",
        """
        import duoka

        class Mine(Exception):
            pass

        def train():
            run = duoka.start()
            if run.rank == 1:
                raise Mine("no data")
            run.barrier()

        try:
            duoka.launch(train, devices="cpu:2")
        except Mine as error:
            print(repr(error), "rank 1" in str(error.__cause__), 'raise Mine("no data")' in str(error.__cause__))
        try:
            duoka.launch(lambda: __import__("os").kill(__import__("os").getpid(), 9), devices="cpu:2")
        except duoka.WorkerFailed as error:
            print("SIGKILL" in str(error))
        try:
            duoka.launch(lambda: (duoka.start(), duoka.launch(print)), devices="cpu:2")
        except duoka.OptionError as error:
            print(error)
        try:
            duoka.launch(lambda: [].pop(0) if duoka.start().rank else object, devices=2)
        except IndexError as error:
            print("IndexError")
        """,
    )
    result = flow.python([script]).ok()
    lines = result.stdout.splitlines()
    assert lines[:2] == ["Mine('no data') True True", "True"]
    assert lines[2].startswith("duoka.launch must be called outside of them, but is")
    assert lines[3] == "IndexError"


def test_what_is_raised_is_the_same_whoever_sees_it_first(flow: Flow) -> None:
    """A rank that waits is told by the others, or by the process that watches."""
    script = flow.write(
        "train.py",
        """
        import sys, time
        import duoka
        from torch import nn, ones, optim

        def late(run, seconds):
            model = run.model(nn.Linear(1, 1))
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                if step == 3 and run.rank == 1:
                    time.sleep(seconds)
                model(run.batch(ones(4, 1))).mean().backward()
                optimizer.step()

        def early(run, seconds):
            if run.rank == 0:
                time.sleep(seconds)
                run.all_sum(1)

        def leaves(run, seconds):
            if run.rank == 1:
                time.sleep(seconds)
                sys.exit(0)
            run.all_sum(1)

        def elsewhere(run, seconds):
            if run.rank == 1:
                time.sleep(seconds)
                run.all_sum(1)
            run.all_sum(1)

        def works(run, seconds):
            time.sleep(run.rank * seconds)

        def watched(work, seconds):
            try:
                duoka.launch(lambda: work(duoka.start(), seconds), devices="cpu:2", timeout="30s", step_timeout="1s")
                return "ended well"
            except duoka.RunError as error:
                return type(error).__name__

        print(watched(late, 60))
        for work in early, leaves, elsewhere:
            print(*(watched(work, seconds) for seconds in (0, 0.3)))
        print(watched(works, 0.3))
        """,
    )
    lines = flow.python([script]).ok().stdout.splitlines()
    assert lines == ["TimedOut", *["RanksApart RanksApart"] * 3, "ended well"]


def test_ctrl_c_ends_all(flow: Flow) -> None:
    script = flow.write(
        "train.py",
        """
        import time
        import duoka

        def train():
            duoka.start()
            print("begun", flush=True)
            time.sleep(60)

        try:
            duoka.launch(train, devices="cpu:2")
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    running = flow.start([script], program="python")
    until(lambda: "begun" in running.stdout())
    running.send(signal.SIGINT)
    assert running.wait().ok().stdout.split() == ["begun", "interrupted"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("duoka.launch(3)", "the function itself"),
        ("duoka.launch(print, devices='cpu:0')", "devices"),
        ("duoka.launch(print, threads=0)", "--threads"),
        (
            "import threading; threading.Thread(target=lambda: duoka.launch(print)).start()",
            "called in the main thread",
        ),
    ],
)
def test_what_is_refused(flow: Flow, call: str, text: str) -> None:
    result = flow.python([flow.write("train.py", f"import duoka\n{call}\n")])
    assert text in result.stderr
    assert "duoka.errors." in result.stderr
