from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

from duoka.errors import DeviceError, OptionError, ScriptError
from duoka.hardware.inventory import Gpu, Inventory
from duoka.planning import describing
from duoka.planning.describing import details
from duoka.planning.options import Machines, Options
from duoka.planning.plan import Device, Kind, Plan, decide, joined
from duoka.script import Target

CPUS = Inventory((), 4, "no NVIDIA driver answers here")
GPUS = Inventory(tuple(Gpu(index, f"GPU-{index}", "NVIDIA H200", 1 << 37) for index in range(4)), 16, "")

PLAIN = "import torch\n"
LAUNCHED = "import torch\n\ntorch.distributed.init_process_group()\n"
EITHER = "import os\nrank = os.environ.get('RANK')\n"
WANTING = "from lightning import Trainer\nTrainer(devices=2)\n"
BY_ARGUMENTS = "import torch\nif input():\n    torch.distributed.init_process_group()\n"
OWN_RANKS = "import torch\ntorch.distributed.init_process_group(rank=0, world_size=1)\n"
API = "import duoka\nrun = duoka.start()\n"


def header(plan: Plan) -> str:
    """The lines as a command prints them."""
    return "\n".join(f"duoka: {line}" for line in describing.header(plan))


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def plan(
        source: str,
        inventory: Inventory = CPUS,
        visible: str | None = None,
        omp: str | None = None,
        **asked: Any,
    ):
        Path("train.py").write_text(source)
        return decide(
            Options(Target("train.py", ("--epochs", "5 6")), **asked), replace(inventory, visible=visible), omp
        )

    return plan


@pytest.mark.parametrize(
    ("source", "asked", "kind", "strategy", "world_size"),
    [
        (PLAIN, {}, Kind.PLAIN, "single", 1),
        (PLAIN, {"devices": "2"}, Kind.PLAIN, "ddp", 2),
        (PLAIN, {"devices": "2", "strategy": "ddp"}, Kind.PLAIN, "ddp", 2),
        (PLAIN, {"devices": "1", "strategy": "single"}, Kind.PLAIN, "single", 1),
        (PLAIN, {"devices": "1", "strategy": "ddp"}, Kind.PLAIN, "single", 1),
        (PLAIN, {"devices": "2", "strategy": "auto"}, Kind.PLAIN, "auto", 2),
        (PLAIN, {"devices": "2", "strategy": "hsdp"}, Kind.PLAIN, "fsdp", 2),
        (PLAIN, {"devices": "2", "strategy": "hsdp", "machines": Machines(2, 0, "a", 1)}, Kind.PLAIN, "hsdp", 2),
        (PLAIN, {"devices": "1", "strategy": "auto"}, Kind.PLAIN, "single", 1),
        (PLAIN, {"devices": "2", "kind": "distributed"}, Kind.DISTRIBUTED, "", 2),
        (LAUNCHED, {"devices": "2"}, Kind.DISTRIBUTED, "", 2),
        (LAUNCHED, {}, Kind.DISTRIBUTED, "", 1),
        (LAUNCHED, {"devices": "2", "kind": "plain"}, Kind.PLAIN, "ddp", 2),
        (EITHER, {"devices": "2"}, Kind.PLAIN, "ddp", 2),
        (EITHER, {"devices": "1"}, Kind.PLAIN, "single", 1),
        (EITHER, {"devices": "1", "kind": "distributed"}, Kind.DISTRIBUTED, "", 1),
        (EITHER, {"devices": "2", "kind": "plain"}, Kind.PLAIN, "ddp", 2),
        (BY_ARGUMENTS, {"devices": "2"}, Kind.PLAIN, "ddp", 2),
        (BY_ARGUMENTS, {"devices": "2", "kind": "distributed"}, Kind.DISTRIBUTED, "", 2),
        (OWN_RANKS, {"devices": "2"}, Kind.DISTRIBUTED, "", 1),
        (OWN_RANKS, {"devices": "2", "kind": "plain"}, Kind.PLAIN, "ddp", 2),
        (API, {"devices": "2"}, Kind.API, "ddp", 2),
        (PLAIN, {"devices": "1", "strategy": "exact"}, Kind.PLAIN, "exact", 1),
        (PLAIN, {"devices": "4", "strategy": "exact"}, Kind.PLAIN, "exact", 4),
        (API, {"devices": "2", "strategy": "exact"}, Kind.API, "exact", 2),
    ],
)
def test_kind_and_strategy(
    plan: Any, source: str, asked: dict[str, str], kind: Kind, strategy: str, world_size: int
) -> None:
    made = plan(source, **asked)
    assert (made.kind, made.strategy, made.world_size) == (kind, strategy, world_size)
    assert len(made.devices) == int(asked.get("devices", "1"))
    assert made.self_launching == (source is OWN_RANKS and kind is Kind.DISTRIBUTED)


@pytest.mark.parametrize(
    ("asked", "cores", "omp", "threads", "noted"),
    [
        ({"devices": "cpu:2"}, 4, None, 2, False),
        ({"devices": "cpu:3"}, 4, None, 1, False),
        ({"devices": "cpu:8"}, 4, None, 1, False),
        ({"devices": "cpu:2"}, 4, "3", 3, True),
        ({"devices": "cpu:2"}, 4, "", 2, False),
        ({"devices": "cpu:2"}, 4, "0", 2, False),
        ({"devices": "cpu:2"}, 4, "many", 2, False),
        ({"devices": "cpu:2", "threads": 5}, 4, "3", 5, False),
        ({"devices": "cpu"}, 4, None, None, False),
        ({"devices": "cpu"}, 4, "3", None, False),
        ({"devices": "cpu", "threads": 5}, 4, None, 5, False),
        ({"devices": "cpu", "strategy": "exact"}, 4, None, 1, False),
        ({"devices": "cpu:2", "strategy": "exact"}, 4, None, 1, False),
        ({"devices": "cpu", "strategy": "exact"}, 4, "3", 3, True),
        ({"devices": "cpu", "strategy": "exact", "threads": 2}, 4, "3", 2, False),
    ],
)
def test_threads(
    plan: Any, asked: dict[str, Any], cores: int, omp: str | None, threads: int | None, noted: bool
) -> None:
    made = plan(PLAIN, inventory=Inventory((), cores), omp=omp, **asked)
    assert made.threads == threads
    assert (f"OMP_NUM_THREADS={omp} respected" in made.notes) == noted


@pytest.mark.parametrize(("devices", "asked", "shares"), [(1, None, 8), (4, None, 8), (16, None, 16), (2, 2, 2)])
def test_shares(plan: Any, devices: int, asked: int | None, shares: int) -> None:
    made = plan(PLAIN, devices=f"cpu:{devices}", strategy="exact", shares=asked)
    assert made.shares == shares
    assert f"strategy exact with {shares} shares of each batch" in header(made)
    assert f"shares      {shares} of each batch" in details(made)
    assert plan(PLAIN, devices="cpu:2").shares == 0


def test_a_script_with_ranks_of_its_own_keeps_all_threads(plan: Any) -> None:
    assert plan(OWN_RANKS, devices="cpu:2").threads is None


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        (
            {"strategy": "ddpd"},
            OptionError,
            "--strategy must be one of auto, ddp, exact, fsdp, hsdp, single, but is 'ddpd'; did you mean ddp?",
        ),
        ({"strategy": "dp", "devices": "2"}, OptionError, "`duoka run --devices 0,1` and duoka.launch(function"),
        (
            {"blocks": ("Block",)},
            OptionError,
            "--blocks must be given with --strategy fsdp, hsdp or auto",
        ),
        (
            {"strategy": "auto", "devices": "2", "checkpoint_activations": True},
            OptionError,
            "--strategy fsdp or hsdp, but is given True; auto adds it if nothing else",
        ),
        (
            {"strategy": "auto", "devices": "2", "kind": "api"},
            OptionError,
            "`duoka forecast --memory` says whether a model needs run.model(net, strategy='fsdp')",
        ),
        (
            {"checkpoint_activations": True},
            OptionError,
            "--checkpoint-activations must be given with --strategy fsdp",
        ),
        ({"cpu_offload": True}, OptionError, "--cpu-offload must be given with --strategy fsdp or hsdp"),
        (
            {"strategy": "fsdp", "devices": "cpu:1", "cpu_offload": True},
            OptionError,
            "--cpu-offload must be given for several devices",
        ),
        (
            {"strategy": "fsdp", "devices": "2", "kind": "api"},
            OptionError,
            "run.model(net, strategy='fsdp') shards a model",
        ),
        ({"strategy": "single", "devices": "2"}, OptionError, "must be ddp, fsdp, exact or auto for 2 devices"),
        ({"strategy": "exact", "devices": "cpu:4", "shares": 2}, OptionError, "--shares must be at least the number"),
        ({"strategy": "exact", "batch_norm": "local"}, OptionError, "--batch-norm must be left out"),
        ({"shares": 4}, OptionError, "--shares must be given with --strategy exact"),
        ({"devices": "0,0"}, OptionError, "--devices must be"),
        ({"devices": "cuda"}, DeviceError, "no NVIDIA driver answers here"),
    ],
)
def test_what_cannot_be(plan: Any, asked: dict[str, str], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        plan(PLAIN, **asked)
    assert said in str(raised.value)


def test_a_missing_script(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="there is no script"):
        decide(Options(Target(str(tmp_path / "train.py"))), CPUS, None)


@pytest.mark.parametrize(
    ("devices", "words"), [("cpu:2", "cpu:2"), ("cpu", "cpu:1"), ("0,3", "0,3"), ("3,", "cuda:3")]
)
def test_devices_in_the_syntax_of_the_option(plan: Any, devices: str, words: str) -> None:
    made = plan(PLAIN, inventory=GPUS, devices=devices)
    assert made.device_words == words
    assert plan(PLAIN, inventory=GPUS, devices=words).devices == made.devices


@pytest.mark.parametrize(("workers", "strategy"), [((2, 2), "hsdp"), ((1, 1), "ddp")])
def test_machines_that_hold_copies(plan: Any, workers: tuple[int, ...], strategy: str) -> None:
    made = plan(PLAIN, devices=str(workers[0]), strategy="hsdp", machines=Machines(2, 0, "a", 1))
    assert joined(made, workers, ("a", "b")).strategy == strategy
    ranks = replace(made, machines=Machines(4, 0, "a", 1, each="rank"), strategy="hsdp")
    assert joined(ranks, (1, 1, 1, 1), ("a", "b", "a", "b"), ("x", "y", "x", "y")).strategy == "hsdp"
    assert joined(ranks, (1, 1, 1, 1), ("a", "b", "a", "b"), ("x", "x", "x", "x")).strategy == "fsdp"
    with pytest.raises(OptionError, match="different numbers of workers, but is 'hsdp'; they have 2, 1"):
        joined(made, (2, 1), ("a", "b"))


def test_a_plan_is_frozen(plan: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        plan(PLAIN).strategy = "ddp"


def test_the_flag_for_the_local_rank_is_passed_on(plan: Any) -> None:
    assert plan("parser.add_argument('--local-rank')").local_rank_flag == "--local-rank"
    assert plan(PLAIN).local_rank_flag is None


HEADERS = [
    (PLAIN, {}, "duoka: 1 CPU worker, strategy single, plain script"),
    (PLAIN, {"devices": "2"}, "duoka: 2 CPU workers of 2 threads, strategy ddp, plain script"),
    (PLAIN, {"devices": "4"}, "duoka: 4 CPU workers of 1 thread, strategy ddp, plain script"),
    (
        LAUNCHED,
        {"devices": "2"},
        "duoka: 2 CPU workers of 2 threads, launched as torchrun would and left alone "
        "(train.py:3 calls init_process_group)",
    ),
    (
        LAUNCHED,
        {"devices": "2", "strategy": "ddp", "batch_norm": "local"},
        "duoka: 2 CPU workers of 2 threads, launched as torchrun would and left alone "
        "(train.py:3 calls init_process_group)\n"
        "duoka: --strategy, --batch-norm: without effect, as the script is left alone",
    ),
    (
        EITHER,
        {"devices": "2"},
        "duoka: 2 CPU workers of 2 threads, strategy ddp, plain script\n"
        "duoka: train.py can also make its own ranks (train.py:2 reads RANK if it is set): --kind distributed "
        "launches it as torchrun would",
    ),
    (
        WANTING,
        {"devices": "2"},
        "duoka: 2 CPU workers of 2 threads, launched as torchrun would and left alone "
        "(train.py:2 calls lightning's Trainer with devices=2)\n"
        "duoka: train.py can also run as a plain script: choose it by --kind plain",
    ),
    (EITHER, {}, "duoka: 1 CPU worker, strategy single, plain script"),
    (
        EITHER,
        {"devices": "2", "kind": "plain"},
        "duoka: 2 CPU workers of 2 threads, strategy ddp, plain script",
    ),
    (
        BY_ARGUMENTS,
        {"devices": "2"},
        "duoka: 2 CPU workers of 2 threads, strategy ddp, plain script\n"
        "duoka: train.py can also make its own ranks (train.py:3 calls init_process_group only under a condition): "
        "--kind distributed launches it as torchrun would",
    ),
    (
        OWN_RANKS,
        {"devices": "2"},
        "duoka: 1 CPU worker, run once, as it has ranks of its own "
        "(train.py:2 gives init_process_group a rank of its own)",
    ),
    (
        API,
        {"devices": "2"},
        "duoka: 2 CPU workers of 2 threads, strategy ddp, script that uses duoka's API (train.py:2 calls start)",
    ),
]


@pytest.mark.parametrize(("source", "asked", "text"), HEADERS)
def test_header(plan: Any, source: str, asked: dict[str, str], text: str) -> None:
    assert header(plan(source, **asked)) == text


@pytest.mark.parametrize(
    ("devices", "visible", "text"),
    [
        ("0,3", None, "duoka: GPUs 0, 3 (NVIDIA H200), strategy ddp, plain script"),
        ("3,", None, "duoka: GPU 3 (NVIDIA H200), strategy single, plain script"),
        (
            "auto",
            "2,3",
            "duoka: GPUs 2, 3 (NVIDIA H200), strategy ddp, plain script\n"
            "duoka: CUDA_VISIBLE_DEVICES=2,3 respected: cuda:0 = GPU 2, cuda:1 = GPU 3",
        ),
    ],
)
def test_header_with_gpus(plan: Any, devices: str, visible: str | None, text: str) -> None:
    assert header(plan(PLAIN, GPUS, visible, devices=devices)) == text


def test_header_with_gpus_of_several_kinds(plan: Any) -> None:
    mixed = Inventory((*GPUS.gpus[:2], Gpu(2, "GPU-x", "NVIDIA A100", 1)), 16)
    assert "GPUs 0, 1 (NVIDIA H200), GPU 2 (NVIDIA A100), strategy ddp" in header(plan(PLAIN, mixed))


def test_details(plan: Any) -> None:
    made: Plan = plan(PLAIN, GPUS, "3,0", devices="2", log_dir=Path("logs"), timeout=90.0)
    assert made.devices == (Device("cuda", 3, "NVIDIA H200"), Device("cuda", 0, "NVIDIA H200"))
    assert details(made).splitlines() == [
        "run         train.py --epochs '5 6'",
        "script      plain",
        "strategy    ddp: every device holds the whole model, and gradients are averaged",
        "rows        even",
        "batch norm  whole",
        "randomness  whole",
        "loading     auto",
        "device      rank 0: GPU 3 (NVIDIA H200)",
        "device      rank 1: GPU 0 (NVIDIA H200)",
        "threads     8 per worker",
        "timeout     90 s for a collective",
        "            after the first step 20 times the slowest step (at least 60 s) for a rank that is idle",
        "output      of rank 0 here, of the others in logs",
        "note        CUDA_VISIBLE_DEVICES=3,0 respected: cuda:0 = GPU 3, cuda:1 = GPU 0",
    ]


def test_details_of_a_script_that_is_left_alone(plan: Any) -> None:
    assert details(plan(WANTING, devices="2")).splitlines() == [
        "run         train.py --epochs '5 6'",
        "script      launched as torchrun would and left alone (train.py:2 calls lightning's Trainer with devices=2)",
        "            train.py can also run as a plain script: choose it by --kind plain",
        "device      rank 0: CPU",
        "device      rank 1: CPU",
        "threads     2 per worker",
        "timeout     600 s for a collective",
        "            after the first step 20 times the slowest step (at least 60 s) for a rank that is idle",
    ]


NODES = Machines(2, 1, "node1", 29500)


@pytest.mark.parametrize(
    ("source", "kind", "strategy"),
    [
        (PLAIN, Kind.PLAIN, "ddp"),
        (EITHER, Kind.PLAIN, "ddp"),
        (LAUNCHED, Kind.DISTRIBUTED, ""),
        (API, Kind.API, "ddp"),
    ],
)
def test_one_device_on_each_of_several_machines_is_several(plan: Any, source: str, kind: Kind, strategy: str) -> None:
    made = plan(source, machines=NODES)
    assert (made.kind, made.strategy, made.workers, made.is_for_one) == (kind, strategy, 1, False)
    assert plan(source).is_for_one


def test_ranks_are_known_when_the_machines_have_met(plan: Any) -> None:
    made = joined(plan(PLAIN, devices="cpu:3", machines=NODES), (2, 3), ("node1", "node2"))
    assert (made.world_size, made.ranks, made.shares) == (5, range(2, 5), 0)
    alone = plan(PLAIN, devices="cpu:3")
    assert (alone.world_size, alone.ranks) == (3, range(3))


def test_shares_are_for_the_ranks_of_all_machines(plan: Any) -> None:
    made = plan(PLAIN, devices="cpu:3", machines=NODES, strategy="exact")
    assert joined(made, (1, 3), ("a", "b")).shares == 8
    assert joined(made, (3, 6), ("a", "b")).shares == 16
    made = plan(PLAIN, devices="cpu:1", machines=NODES, strategy="exact", shares=2)
    assert joined(made, (1, 1), ("a", "b")).shares == 2
    with pytest.raises(OptionError, match="--shares must be at least the number of devices, 4"):
        joined(made, (3, 1), ("a", "b"))


def test_a_script_that_makes_its_ranks_is_for_one_machine(plan: Any) -> None:
    with pytest.raises(OptionError, match=r"--machines must be 1 for train\.py, but is 2; the script makes"):
        plan(OWN_RANKS, machines=NODES)


def test_machines_are_shown(plan: Any) -> None:
    made = plan(PLAIN, devices="cpu:2", machines=NODES)
    assert header(made) == (
        "duoka: 2 CPU workers of 2 threads, strategy ddp, plain script\n"
        "duoka: machine 1 of 2, rendezvous at node1:29500"
    )
    shown = details(made).splitlines()
    assert "machine     1 of 2, rendezvous at node1:29500" in shown
    assert "device      local rank 1: CPU" in shown
    assert any(line.startswith("output      of rank 0 at machine 0, of the others in") for line in shown)
    told = plan(PLAIN, machines=Machines(2, 0, "node1", 29500, engine="Slurm"))
    assert "machine 0 of 2, rendezvous at node1:29500 (set by Slurm)" in header(told)


OLD = Gpu(0, "GPU-0", "GTX 1080", 8 << 30, speed=2560 * 1733)
NEW = Gpu(1, "GPU-1", "RTX 3090", 24 << 30, speed=10496 * 1695)


@pytest.mark.parametrize(
    ("gpus", "options", "weights", "measures"),
    [
        ((OLD, NEW), {}, (1.0, 3.76), True),  # 4.01 times as fast, but three times the memory
        ((OLD, NEW), {"rows": "even"}, (), False),
        ((OLD, NEW), {"rows": "3:1"}, (3.0, 1.0), False),
        ((OLD, replace(OLD, index=1, uuid="GPU-1")), {}, (), False),
        ((OLD, replace(OLD, index=1, uuid="GPU-1")), {"rows": "auto"}, (), True),
        ((OLD, replace(OLD, index=1, uuid="GPU-1", used=4 << 30)), {}, (1.5, 1.0), True),
        ((OLD, replace(NEW, speed=0)), {}, (), True),
        ((), {"devices": "cpu:2"}, (), False),
        ((), {"devices": "cpu:2", "rows": "auto"}, (), True),
        ((OLD, NEW), {"strategy": "exact"}, (1.0, 3.76), False),
        ((OLD, NEW), {"strategy": "exact", "rows": "even"}, (), False),
        ((OLD, NEW), {"strategy": "exact", "rows": "3:1"}, (3.0, 1.0), False),
    ],
)
def test_devices_that_differ_share_batches_as_measured(
    plan: Any, gpus: tuple[Gpu, ...], options: dict[str, Any], weights: tuple[float, ...], measures: bool
) -> None:
    made = plan(PLAIN, Inventory(gpus, 16, ""), **{"devices": "0,1", **options})
    assert (made.weights, made.measures_rows) == (weights, measures)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ("3:1", {"devices": "cpu:3"}, "one number for each of 3 devices, but is '3:1'"),
        ("0:1", {}, "a number above 0 for each device"),
        ("-1:1", {}, "a number above 0 for each device"),
        ("3:x", {}, "a number above 0 for each device"),
        ("nan:1", {}, "a number above 0 for each device"),
        ("", {"rows": ":"}, "a number above 0 for each device"),
    ],
)
def test_rows_that_no_devices_can_have(plan: Any, rows: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan(PLAIN, **{"devices": "cpu:2", "rows": rows, **options})


@pytest.mark.parametrize(
    ("shares", "rows", "told"),
    [
        (None, "3:1", "6 + 2 shares of each batch, plain"),
        (None, "3.8:1", "6 + 2 shares of each batch, plain"),
        (2, "3:1", "1 + 1 shares of each batch, as 3 : 1 needs more --shares, plain"),
        (4, "1:1000", "1 + 3 shares of each batch, as 1 : 1000 needs more --shares, plain"),
        (8, "", "8 shares of each batch, plain"),
    ],
)
def test_shares_of_exact_follow_the_rows(plan: Any, shares: int | None, rows: str, told: str) -> None:
    made = plan(PLAIN, devices="cpu:2", strategy="exact", shares=shares, rows=rows)
    assert f"strategy exact with {told}" in header(made)


def test_rows_without_effect_are_told(plan: Any) -> None:
    assert plan(PLAIN, devices="cpu:1", rows="3:1").notes == ("--rows 3:1: one device has all rows",)
    assert "--rows: without effect" in plan(LAUNCHED, devices="cpu:2", rows="3:1").notes[0]


def test_rows_are_for_the_ranks_of_all_machines(plan: Any) -> None:
    made = plan(PLAIN, devices="cpu:1", machines=NODES, rows="3:1")
    assert joined(made, (1, 1), ("a", "b")).weights == (3.0, 1.0)
    with pytest.raises(OptionError, match="one number for each of 3 devices"):
        joined(made, (1, 2), ("a", "b"))
