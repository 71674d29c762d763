"""Unedited scripts on 1 to 4 workers print the numbers, and save the weights, that `python script.py` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.flows.flow import Flow
from tests.flows.reference import Reference

HERE = Path(__file__).parent / "scripts"
SCRIPTS = {path.stem: path for path in sorted(HERE.glob("*.py"))}
IN_PARTS = {path.stem: path for path in sorted((HERE / "fsdp").glob("*.py"))}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flow, str], Reference]:
    """What plain python gives on one device, once for each script, on CPUs and on cards."""
    done: dict[tuple[str, str | None], Reference] = {}

    def of(flow: Flow, name: str) -> Reference:
        key = name, flow.cards.get("SIMULATED_DEVICE")
        if key not in done:
            alone = flow.alone(tmp_path_factory.mktemp(name))
            done[key] = Reference(alone, [alone.script(script(name)), "weights.pt"], "weights.pt")
        return done[key]

    return of


def script(name: str) -> Path:
    return SCRIPTS.get(name) or IN_PARTS[name]


RUNS: list[Any] = [(name, 3) for name in SCRIPTS]  # shares are uneven: what holds on them, holds on two
RUNS += [("regress", workers) for workers in (1, 2, 4)]
RUNS += [pytest.param("classify", workers, marks=pytest.mark.long) for workers in (1, 4)]
RUNS += [pytest.param(name, 2, marks=pytest.mark.long) for name in SCRIPTS if name != "regress"]


def on_cards(names: Iterable[str], short: Collection[str]) -> list[Any]:
    """Parameters for runs on two simulated cards; those that are not in `short` are marked long."""
    marks = {name: [pytest.mark.cards, *[pytest.mark.long] * (name not in short)] for name in names}
    return [pytest.param(name, 2, marks=marks[name], id=f"{name}-cards") for name in names]


# Left out: their loaders' workers or generators are the CPU's, CTC, arrays of batches, autocast of the CPU.
NOT_ON_CARDS = ("changing", "precision", "reading", "sequences", "streams")
RUNS += on_cards([name for name in SCRIPTS if name not in NOT_ON_CARDS], ("adversaries", "classify", "language"))


RUNS.append(pytest.param("classify", 2, marks=pytest.mark.npu, id="classify-npu"))


@pytest.mark.parametrize(("name", "workers"), RUNS)
def test_same_result(flow: Flow, reference: Callable[[Flow, str], Reference], name: str, workers: int) -> None:
    saved = flow.folder / "weights.pt"
    result = flow.run(["run", "--devices", f"cpu:{workers}", flow.script(SCRIPTS[name]), saved]).ok()
    reference(flow, name).assert_same(result.stdout, saved)


NOT_IN_PARTS = ("by_hand", "changing")  # LBFGS; rounding is amplified past what is compared
PARTED: list[Any] = [("language", 3), ("precision", 2), *((name, 3) for name in IN_PARTS)]
PARTED += [
    pytest.param(name, workers, marks=pytest.mark.long)
    for name in (*SCRIPTS, *IN_PARTS)
    for workers in (2, 3)
    if (name, workers) not in PARTED and name not in NOT_IN_PARTS
]
PARTED_ON_CARDS = [name for name in (*SCRIPTS, *IN_PARTS) if name not in (*NOT_IN_PARTS, *NOT_ON_CARDS)]
PARTED += on_cards(PARTED_ON_CARDS, ("language", "apart"))


@pytest.mark.parametrize(("name", "workers"), PARTED)
def test_same_result_with_parameters_in_parts(
    flow: Flow, reference: Callable[[Flow, str], Reference], name: str, workers: int
) -> None:
    saved = flow.folder / "weights.pt"
    words = ["run", "--devices", f"cpu:{workers}", "--strategy", "fsdp"]
    result = flow.run([*words, flow.script(script(name)), saved]).ok()
    reference(flow, name).assert_same(result.stdout, saved)
