"""Bad input: one clear error on every rank (what was given, what is allowed, what to do), and no hang."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import SequentialSampler

import duoka
from tests.run.ranks import on_ranks

ROWS = torch.randn(8, 3)


class Replacing(nn.Linear):
    """Gets other parameters when it is moved."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.weight = nn.Parameter(self.weight.detach().clone())
        return self


def parts(names: str) -> nn.Module:
    return nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))


def closed(use: Callable[[duoka.Run], Any]) -> Callable[[duoka.Run], Any]:
    def after(run: duoka.Run) -> Any:
        run.close()
        use(run)

    return after


Given = Callable[[duoka.Run], Any]
EVERY: dict[str, tuple[Given, str]] = {  # also where there is one rank
    "strategy": (lambda run: run.model(nn.Linear(1, 1), strategy="dpp"), "strategy must be one of .* did you mean d"),
    "dp": (
        lambda run: run.model(nn.Linear(1, 1), strategy="dp", devices=2, output_device=1),
        r"strategy must be left out.*but is 'dp'; `duoka run --devices 0,1` and duoka\.launch\(function",
    ),
    "device_ids": (lambda run: run.model(nn.Linear(1, 1), device_ids=[0]), "a rank has one device"),
    "precision": (
        lambda run: run.model(nn.Linear(1, 1), precision="fp16"),
        "torch.autocast, .*GradScaler",
    ),
    "compile": (lambda run: run.model(nn.Linear(1, 1), compile=True), r"call model.compile\(\)"),
    "option": (lambda run: run.model(nn.Linear(1, 1), fast=True), "run.model must be given no such option"),
    "batch size 0": (lambda run: run.loader(ROWS, 0), "batch_size must be a whole number of samples, at least 1"),
    "batch size below": (lambda run: run.loader(ROWS, -4), "batch_size must be .* but is -4"),
    "no batch size": (lambda run: run.loader(ROWS), "batch_size must be"),
    "a dict of tensors": (lambda run: run.loader({"x": ROWS}, 4), "but is 'a dict'; torch.utils.data.StackDataset"),
    "a dict of numbers": (lambda run: run.log({"loss": 1.0}), r"run.log\(step=3, loss=loss\)"),  # type: ignore[arg-type]
    "half a sample": (lambda run: run.loader(ROWS, 2.5), "batch_size must be .* but is 2.5"),  # type: ignore[arg-type]
    "sampler and shuffle": (
        lambda run: run.loader(ROWS, 4, shuffle=True, sampler=SequentialSampler(range(8))),
        "a sampler decides the order: leave shuffle out",
    ),
    "no parameters": (lambda run: run.model(nn.ReLU()), "a module with parameters"),
    "replaced parameters": (lambda run: run.model(Replacing(2, 2)), "parameters stay the same .*optimizer"),
    "no model": (lambda run: run.model(3), r"given an nn\.Module"),  # type: ignore[type-var]
    "start again": (lambda run: duoka.start(), "close the run before"),
    "nothing to hold": (lambda run: run.no_sync().__enter__(), "at least one model"),
    "no rows": (lambda run: run.batch(torch.tensor(3.0)), "samples in its first dimension"),
    "all_gather of text": (lambda run: run.all_gather("text"), "given tensors, numbers, or dicts"),
    "loader after close": (closed(lambda run: run.loader(ROWS, 4)), r"run\.loader must be used before"),
    "model after close": (closed(lambda run: run.model(nn.Linear(1, 1))), r"run\.model must be used before"),
    "sum after close": (closed(lambda run: run.all_sum(1)), r"run\.all_sum must be used before"),
    "log after close": (closed(lambda run: run.log(loss=1)), r"run\.log must be used before"),
    "barrier after close": (closed(lambda run: run.barrier()), r"run\.barrier must be used before"),
}
SEVERAL: dict[str, tuple[Given, str]] = {  # where ranks give different things
    "single": (lambda run: run.model(nn.Linear(1, 1), strategy="single"), "strategy must be auto or ddp for 2 ranks"),
    "shape of a tensor": (
        lambda run: run.all_gather(torch.ones(2, 3 + run.rank)),
        r"rank 1 and rank 0 differ: .*\(rows, 3\).*\(rows, 4\)",
    ),
    "type of a tensor": (
        lambda run: run.all_sum(torch.ones(2, dtype=torch.float64 if run.rank else torch.float32)),
        "float32.*float64",
    ),
    "shape of a model": (
        lambda run: run.model(nn.Linear(2, 3 + run.rank)),
        r"their models differ: rank 0 has weight \(3, 2\) float32 where the other has weight \(4, 2\)",
    ),
    "order of a model": (
        lambda run: run.model(parts("ba" if run.rank else "ab")),
        r"rank 0 has a\.weight \(2, 2\) float32 where the other has b\.weight",
    ),
    "more in a model": (lambda run: run.model(parts("abc"[: 2 + run.rank])), r"c\.weight .* only on one of them"),
}


def said(given: Given) -> str:
    """The error, in a run of its own; the ranks must still be together after it."""
    with duoka.start(seed=0) as run:
        with pytest.raises(duoka.DuokaError) as error:
            given(run)
        if run._opened is not None:
            assert run.all_sum(1) == run.world_size
    return str(error.value)


@cache
def said_by_ranks() -> list[dict[str, str]]:
    """Return the messages of each of two ranks, for every row."""
    rows = EVERY | SEVERAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: pytest's own are no matter
        return duoka.launch(lambda: {name: said(given) for name, (given, _) in rows.items()}, devices="cpu:2")


@pytest.mark.parametrize("name", EVERY)
def test_one_rank(name: str) -> None:
    given, text = EVERY[name]
    assert re.search(text, found := said(given)), found


@pytest.mark.parametrize("name", EVERY | SEVERAL)
def test_the_same_error_on_every_rank(name: str) -> None:
    one, other = (found[name] for found in said_by_ranks())
    assert one == other
    assert len(one.splitlines()) == 1
    assert re.search((EVERY | SEVERAL)[name][1], one), one


def test_an_optimizer_that_was_made_before() -> None:
    """Parameters stay the same objects, so it updates the model's own."""

    def work(run: duoka.Run, before: bool) -> Any:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if before else None
        run.model(model)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in run.loader(ROWS, batch_size=4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.weight.tolist()

    found = [on_ranks(2, lambda run, before=before: work(run, before)) for before in (False, True)]
    assert found[0] == found[1]


STARTS: list[tuple[dict[str, Any], str]] = [
    ({"device": "gpu"}, "device must be auto, or what torch calls it"),
    ({"device": "cuda:99"}, "no cuda device here|has no cuda device"),
    ({"seed": -1}, "seed must be a whole number"),
    ({"batch_norm": "sync"}, "batch_norm must be one of whole, local"),
    ({"randomness": "wrker"}, "did you mean worker"),
    ({"loading": "all"}, "loading must be one of"),
    ({"timeout": -5}, "timeout must be more than 0"),
    ({"compress": "zip"}, "compress must be one of none, bf16, fp16, powersgd"),
    ({"log": "consol"}, "did you mean console"),
]


def test_what_start_refuses_on_every_rank() -> None:
    def begin() -> Any:
        texts = []
        for how, _ in STARTS:
            with pytest.raises(duoka.AskedError) as error:
                duoka.start(**how)
            texts.append(str(error.value))
        with duoka.start(seed=0) as run:
            assert run.all_sum(1) == 2
        return texts

    one, other = duoka.launch(begin, devices="cpu:2", timeout=20)
    assert one == other
    for text, (how, expected) in zip(one, STARTS, strict=True):
        assert re.search(expected, text), (how, text)
