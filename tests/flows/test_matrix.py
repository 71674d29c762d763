"""Every script under every strategy: what python prints and saves, or the reason why not."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_scripts import EXAMPLES, SECONDS
from tests.flows.flow import ROOT, Flow
from tests.flows.reference import Reference
from tests.flows.test_machines import SAME, free_place, machine

HERE = Path(__file__).parent / "scripts"
FLOWS = {path.stem: path for folder in ("", "fsdp") for path in sorted((HERE / folder).glob("*.py"))}
BITS = {f"exact/{name}": HERE / f"exact/{name}.py" for name in ("mlp", "cnn", "transformer", "force", "hard", "gan")}
SAMPLES = {f"examples/{example.name}": example for example in EXAMPLES}
API = {"examples/api": ROOT / "examples/api.py"}

# The words of the command; of hsdp, of each of two machines.
COLUMNS = {
    "ddp": ("--devices", "cpu:3"),
    "exact": ("--devices", "cpu:2", "--strategy", "exact"),
    "fsdp": ("--devices", "cpu:3", "--strategy", "fsdp"),
    "offload": ("--devices", "cpu:2", "--strategy", "fsdp", "--cpu-offload"),
    "hsdp": ("--devices", "cpu:2", "--strategy", "hsdp"),
    "rows": ("--devices", "cpu:3", "--rows", "1:5:2"),
    "rows of fsdp": ("--devices", "cpu:2", "--rows", "3:1", "--strategy", "fsdp"),
    "rows of exact": ("--devices", "cpu:2", "--rows", "3:1", "--strategy", "exact"),
    "moving rows": ("--devices", "cpu:3"),
}
MOVING = Path(__file__).parent / "moving.py"
IN_PARTS = ("fsdp", "offload", "hsdp", "rows of fsdp")
HOLES: dict[tuple[str, str], str] = {
    **{("by_hand", one): "refused: LBFGS makes one vector of all parameters" for one in IN_PARTS},
    ("examples/api", "offload"): "the API has no such option",
    (
        "examples/dataparallel_2019",
        "rows of fsdp",
    ): "a bias before BatchNorm has no gradient but rounding of its rows",
}
SHORT = {
    ("regress", "hsdp"),
    ("weighted", "exact"),
    ("attention", "offload"),
    ("metric", "fsdp"),
    ("examples/api", "fsdp"),
    ("examples/api", "rows"),
    ("everyday", "rows"),
    ("layers", "moving rows"),
    ("uneven", "rows"),
    ("uneven", "rows of exact"),
    ("uneven", "moving rows"),
}


# Left out: their loaders' workers or generators are the CPU's, CTC, arrays of batches, autocast of the CPU. The last
# takes two cards under python, too, whose BatchNorm is that of each.
NOT_ON_CARDS = (
    *("changing", "precision", "reading", "sequences", "streams", "exact/cnn"),
    *("examples/crnn/train", "examples/dataparallel_2019"),
)
SHORT_ON_CARDS = {("weighted", "rows"), ("examples/api", "exact")}


def _cells() -> list[Any]:
    """Return each script under each strategy, on CPUs and on simulated cards; most are marked long."""
    cells = []
    for name, column in product((*FLOWS, *BITS, *SAMPLES, *API), COLUMNS):
        reason = HOLES.get((name, column))
        marks = [pytest.mark.skip(reason)] if reason else []
        long = [pytest.mark.long] * ((name, column) not in SHORT)
        cells.append(pytest.param(name, column, marks=[*marks, *long], id=f"{name}-{column}"))
        if name not in NOT_ON_CARDS:
            marks += [pytest.mark.cards, *[pytest.mark.long] * ((name, column) not in SHORT_ON_CARDS)]
            cells.append(pytest.param(name, column, marks=marks, id=f"{name}-{column}-cards"))
    return cells


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flow, str], Reference]:
    """What python gives, once for each script, on a CPU and on a card."""
    done: dict[tuple[str, bool], Reference] = {}

    def of(flow: Flow, name: str) -> Reference:
        key = name, bool(flow.cards)
        if key not in done:
            alone = flow.alone(tmp_path_factory.mktemp(name.replace("/", "-")))
            script, words, saved = _script(alone, name)
            done[key] = Reference(alone, [script, *words], saved)
        return done[key]

    return of


def _script(flow: Flow, name: str) -> tuple[Path, tuple[str, ...], str | None]:
    """Return a script, its arguments, and the name of the file that it leaves."""
    if name in SAMPLES:
        return SAMPLES[name].script, SAMPLES[name].options, SAMPLES[name].saved
    if name in FLOWS:
        return flow.script(FLOWS[name]), ("weights.pt",), "weights.pt"
    return flow.script(BITS[name]) if name in BITS else API[name], (), None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "column"), _cells())
def test_every_script_under_every_strategy(
    flow: Flow, reference: Callable[[Flow, str], Reference], name: str, column: str
) -> None:
    script, words, saved = _script(flow, name)
    options = COLUMNS[column]
    rows = {"rows": "ddp", "moving rows": "ddp", "rows of fsdp": "fsdp", "rows of exact": "exact"}
    strategy = rows.get(column, column)
    if name in API and strategy not in ("ddp", "exact"):  # which the script asks for
        text = script.read_text().replace("run.model(net)", f"run.model(net, strategy={strategy!r})")
        saves = '    if run.is_first:\n        torch.save(model.state_dict(), "digits.pt")\n'
        assert saves in text  # on one rank alone, which holds a part of the model now
        text = text.replace(saves, '    duoka.save_weights(model, "digits.safetensors")\n')
        script, options = flow.write("script.py", text), options[: 4 if "--rows" in options else 2]
    if column == "moving rows":
        options += ("--kind", "api") if name in API else ()
        script, words = MOVING, (str(script), *words)
    printed = _hsdp(flow, options, script, words) if column == "hsdp" else _run(flow, options, script, words)
    printed = _comparable(printed)
    file = None if saved is None else flow.folder / saved
    reference(flow, name).assert_same(printed, file, _comparable)


def _comparable(printed: str) -> str:
    """Return what a run prints but for times, and for digests of all bits."""
    return re.sub(r"(?m)^[0-9a-f]{64}$", "", SECONDS.sub("", printed))


def _run(flow: Flow, options: tuple[str, ...], script: Path, words: tuple[str, ...]) -> str:
    return flow.run(["run", *options, script, *words], timeout=200).ok().stdout


def _hsdp(flow: Flow, options: tuple[str, ...], script: Path, words: tuple[str, ...]) -> str:
    """Run on two machines, which are this one."""
    place = free_place()
    command = ["run", *options]
    machines = [
        flow.start(
            [*command, *machine(number, 2, place), script, *words],
            env={**SAME, "SIMULATED_MACHINE": f"{zlib.crc32(f'{flow.folder} {number}'.encode()):08x}"},
            timeout=200,
        )
        for number in range(2)
    ]
    first, other = (one.wait() for one in machines)
    other.ok()
    return first.ok().stdout
