"""What models of many small functions cost on two workers: processor time of a thread, and a step."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.runs import ROUNDS, SCRIPTS, Samples, duoka, output
from benchmarks.table import Absent, Row

SCRIPT = SCRIPTS / "host.py"
MODELS = {  # bars: of a forward pass, and of a step
    "gpt": ("a GPT of 12 layers of width 16", 1.5, 1.1),
    "gpt-dropout": ("the same GPT with dropout", 1.6, 1.15),
    "resnet": ("a ResNet-18 on 8x8 images", 1.6, 1.15),
    "lstm": ("an LSTM cell, 50 steps", 1.6, 1.15),
    "encoder": ("6 layers of nn.TransformerEncoder", 1.6, 1.15),
    "bert": ("4 layers of Hugging Face's BERT", 1.6, 1.15),
}
UNITS = {"forward": "us", "step": "ms", "evaluated": "us", "evaluation": "ms", "first": "ms"}


def measure(quick: bool) -> Iterator[Row | Absent]:
    """Each script measures by itself; BatchNorm is that of each worker's rows, as DDP by hand computes it."""
    for model, (words, forward, step) in MODELS.items():
        if model == "bert" and find_spec("transformers") is None:
            yield Absent(f"{words}: a step on 2 workers, against DDP by hand")
            continue
        of = _measured(quick, {"duoka": ("--batch-norm", "local", *_plain(model)), "by hand": _by_hand(model, "ddp")})
        for name, what, bar in (
            ("step", "a step", step),
            ("forward", "processor time of a forward pass", forward),
            ("evaluation", "a batch of evaluation", None),
            ("evaluated", "processor time of a forward pass in evaluation", 1.6),
            ("first", "the first step", None),
        ):
            yield Row(
                f"{words}: {what} on 2 workers, against DDP by hand", of["duoka"][name], of["by hand"][name], bar
            )
    words = MODELS["gpt"][0]
    ways = {
        "plain": _plain("gpt"),
        "api": ("--kind", "api", SCRIPT, "gpt", "api"),
        "fsdp": ("--strategy", "fsdp", *_plain("gpt")),
        "by hand": _by_hand("gpt", "fully_shard"),
    }
    of = _measured(quick, ways)
    for name, what in (("step", "a step"), ("forward", "processor time of a forward pass")):
        yield Row(f"{words}: {what} by the API, against a plain script", of["api"][name], of["plain"][name], 1.05)
    yield Row(
        f"{words}: a step with fsdp, against fully_shard by hand", of["fsdp"]["step"], of["by hand"]["step"], 1.1
    )


def _plain(model: str) -> tuple[str | Path, ...]:
    return ("--kind", "plain", SCRIPT, model)


def _by_hand(model: str, way: str) -> tuple[str | Path, ...]:
    return ("--kind", "distributed", SCRIPT, model, way)  # threads and memory are the same


def _measured(quick: bool, contestants: dict[str, tuple[str | Path, ...]]) -> dict[str, dict[str, Samples]]:
    """What each contestant prints, by the names of UNITS; they run in turn."""
    values: dict[str, list[list[float]]] = {who: [] for who in contestants}
    for _ in range(1 if quick else ROUNDS):
        for who, words in contestants.items():
            values[who].append([float(word) for word in output(duoka(2, *words)).split()])
    return {
        who: {
            name: Samples(each, unit)
            for (name, unit), each in zip(UNITS.items(), zip(*runs, strict=True), strict=True)
        }
        for who, runs in values.items()
    }
