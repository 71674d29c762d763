"""Scripts that use the API, in real processes: the numbers of the plain loop on one device, however started."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import duoka
from duoka.origins.process import this_process
from tests.flows.flow import Flow, Warm
from tests.flows.reference import Reference
from tests.run.ranks import each_on_ranks, on_ranks

LOOP = Path(__file__).parent / "scripts" / "loop.py"
CASES = [("103", "shuffled"), ("96", "in-order")]


@pytest.fixture(scope="module")
def reference(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """The plain loop, run once for each case."""
    done: dict[tuple[str, ...], Reference] = {}

    def of(*case: str) -> Reference:
        if case not in done:
            args = [LOOP, "plain", *case, "weights.pt"]
            done[case] = Reference(Flow(warm, tmp_path_factory.mktemp("plain")), args, "weights.pt")
        return done[case]

    return of


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_same_result(flow: Flow, reference: Callable[..., Reference], case: tuple[str, str], workers: int) -> None:
    saved = flow.folder / "weights.pt"
    result = flow.run(["run", "--devices", f"cpu:{workers}", LOOP, "api", *case, saved]).ok()
    reference(*case).assert_same(result.stdout, saved)


def test_it_works_alone(flow: Flow, reference: Callable[..., Reference]) -> None:
    saved = flow.folder / "weights.pt"
    assert flow.python([LOOP, "api", *CASES[0], saved]).ok().stdout == reference(*CASES[0]).stdout


def variables(name: str, rank: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for one of two processes."""
    told = {
        "torchrun": {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost"},
        "srun": {
            "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 0,
            "SLURM_NTASKS": 4,  # of the job; the step has two
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_PROCID": rank,
            "SLURM_LOCALID": rank,
        },
        "mpirun": {
            "PMIX_NAMESPACE": f"prterun-node-{port}@1",
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        },
        "mpiexec": {"PMI_RANK": rank, "PMI_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port},
    }[name]
    told |= {"MASTER_PORT": port} if name == "torchrun" else {}
    return {key: str(value) for key, value in told.items()}


@pytest.mark.parametrize("name", ["torchrun", "srun", "mpirun", "mpiexec"])
def test_it_works_under_any_launcher(flow: Flow, reference: Callable[..., Reference], name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    args = [LOOP, "api", *CASES[1], flow.folder / "weights.pt"]
    ranks = [flow.start(args, program="python", env=variables(name, rank, port)) for rank in range(2)]
    for result in [rank.wait().ok() for rank in ranks]:
        reference(*CASES[1]).assert_same(result.stdout, flow.folder / "weights.pt")


@pytest.mark.long  # four processes import torch; the test above has torchrun's variables
def test_it_works_under_torchrun_itself(
    tmp_path: Path, reference: Callable[..., Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--standalone", "--nproc-per-node=2", "--local-ranks-filter=0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, LOOP, "api", *CASES[1], tmp_path / "w.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    reference(*CASES[1]).assert_same(re.sub(r"(?m)^\[default0\]:", "", done.stdout), tmp_path / "w.pt")


def test_who_am_i() -> None:
    def work(run: duoka.Run) -> Any:
        return run.rank, run.local_rank, run.world_size, run.is_first, str(run.device), run.machine

    host = socket.gethostname()
    assert on_ranks(2, work) == [(0, 0, 2, True, "cpu", host), (1, 1, 2, False, "cpu", host)]


def test_functions_of_the_script_s_own_after_a_run() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    def work(run: duoka.Run) -> Any:
        run.close()
        return Double.apply(torch.ones(1)).item()

    assert on_ranks(2, work) == [2.0, 2.0]


class Hidden(torch.utils.data.Dataset[Any]):
    """A dataset with a batch where it is not searched for one."""

    held: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)) if self.held is None else self.held[0][0][0][0][0][0][index % 2]


def test_a_rank_that_reads_its_own_rows_takes_part_in_no_collective() -> None:
    def work(run: duoka.Run) -> Any:
        data = Hidden()
        loader = run.loader(data, batch_size=4)
        for x in loader:
            data.held = [[[[[[x * 2]]]]]]
            x.sum().item()

    errors = each_on_ranks(2, {"work": work})["work"]
    assert [type(error) for error in errors] == [duoka.Refused] * 2
    assert "while this rank reads its own rows" in str(errors[0])


def test_a_run_is_closed_and_another_one_begins() -> None:
    def begin() -> Any:
        call, backward, losses = nn.Module.__call__, torch.autograd.backward, []
        model = nn.Linear(3, 1)
        for seed in (0, 0, 1):
            with duoka.start(seed=seed) as run:
                run.model(model)
                nn.init.normal_(model.weight)
                (x,) = next(iter(run.loader(torch.randn(6, 3), batch_size=6)))
                loss = model(x).square().mean()
                loss.backward()
                losses.append(loss.item())
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()  # an ordinary one again
            assert model.weight.grad.tolist() == [[1, 1, 1]]
            assert (nn.Module.__call__, torch.autograd.backward) == (call, backward)
            with pytest.raises(duoka.OptionError, match="used after"):
                run.barrier()
        assert losses[0] == losses[1] != losses[2]
        return losses

    found = duoka.launch(begin, devices="cpu:2")
    assert found[0] == found[1]
    assert found[0] == pytest.approx(duoka.launch(begin, devices="cpu:1")[0], rel=1e-5)


def test_one_run_at_a_time() -> None:
    def work(run: duoka.Run) -> Any:
        with pytest.raises(duoka.OptionError, match="close the run before"):
            duoka.start()

    on_ranks(2, work)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"seed": -1}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"device": "gpu"}, "device must be"),
        ({"device": "cuda"}, "torch finds no cuda device here"),
        ({"batch_norm": "sync"}, "batch_norm must be"),
        ({"randomness": "wrker"}, "did you mean worker"),
        ({"timeout": 0}, "timeout must be"),
    ],
    ids=str,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_what_start_refuses(how: dict[str, Any], text: str) -> None:
    with pytest.raises(duoka.AskedError, match=text):
        duoka.start(**how)


def test_ranks_with_other_options_are_told() -> None:
    def begin() -> Any:
        rank = this_process().origin.rank
        with pytest.raises(duoka.RanksApart, match=r"'seed': 0.*'seed': 1"):
            duoka.start(seed=rank)
        with duoka.start(seed=0) as run:
            return run.all_sum(1)

    assert duoka.launch(begin, devices="cpu:2") == [2, 2]


def test_model() -> None:
    class Other(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, size), nn.Linear(size, 1)

    def work(run: duoka.Run) -> Any:
        torch.manual_seed(run.rank)
        model = Other(3)
        parameters = list(model.parameters())
        assert run.model(model) is model
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        assert list(model.state_dict()) == ["first.weight", "first.bias", "last.weight", "last.bias"]
        with pytest.raises(duoka.RanksApart, match=r"first.weight \(3, 2\) float32.*first.weight \(4, 2\) float32"):
            run.model(Other(3 + run.rank))
        with pytest.raises(duoka.OptionError, match="with parameters"):
            run.model(nn.ReLU())
        with pytest.raises(duoka.OptionError, match="not wrapped"):
            run.model(nn.DataParallel(nn.Linear(1, 1)))
        with pytest.raises(duoka.OptionError, match="initialised parameters"):
            run.model(nn.LazyLinear(3))
        with pytest.raises(duoka.OptionError, match=r"an nn\.Module"):
            run.model(nn.Linear)  # type: ignore[type-var]
        return [value.tolist() for value in model.state_dict().values()]

    one, other = on_ranks(2, work)
    assert one == other


def test_own_tensors_and_batches() -> None:
    """A tensor of a rank's own is computed as it is; gradients are averaged. `run.batch` shares one out."""

    def work(run: duoka.Run) -> Any:
        model = run.model(nn.Linear(2, 1, bias=False))
        own = model(torch.full((4, 2), float(run.rank)))
        own.mean().backward()
        averaged = model.weight.grad.tolist()
        model.zero_grad()
        batch = run.batch(torch.arange(8.0).view(4, 2))
        model(batch).sum().backward()
        rows = len(batch.to_local())
        return (
            type(own) is torch.Tensor,
            averaged,
            rows,
            model.weight.grad.tolist(),
            run.batch(torch.ones(1, 2)).shape,
        )

    assert on_ranks(2, work) == [(True, [[0.5, 0.5]], 2, [[12.0, 16.0]], (1, 2))] * 2


def test_gradients_are_held() -> None:
    def work(run: duoka.Run) -> Any:
        one, two = (run.model(nn.Linear(2, 1, bias=False)) for _ in range(2))
        own = torch.full((1, 2), float(run.rank + 1))
        with run.no_sync(one):
            (one(own) + two(own)).sum().backward()
        held = one.weight.grad.tolist(), two.weight.grad.tolist()
        two(own).sum().backward()  # does not even reach the first
        return held, one.weight.grad.tolist(), two.weight.grad.tolist()

    (first, *one), (second, *other) = on_ranks(2, work)
    assert (first, second) == (([[1, 1]], [[1.5, 1.5]]), ([[2, 2]], [[1.5, 1.5]]))
    assert one == other == [[[1.5, 1.5]], [[3.0, 3.0]]]


def test_hooks_after_accumulation_are_called_with_whole_gradients_in_each_piece() -> None:
    def work(run: duoka.Run) -> Any:
        model, norms = run.model(nn.Linear(2, 1)), []
        model.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
        for batch in run.loader(torch.arange(24.0).reshape(12, 2), 12, accumulate=3):
            for (x,) in batch:
                model(x).sum().backward()
        return norms

    (alone,), ranks = on_ranks(1, work), on_ranks(2, work)
    assert len(alone) == 3
    assert ranks == [pytest.approx(alone)] * 2


def test_what_rank_0_does_first(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> Any:
        with run.first() as first:
            if first:
                time.sleep(0.2)
                (tmp_path / "data").write_text("there")
            found = (tmp_path / "data").read_text()
        with pytest.raises(OSError if run.is_first else duoka.PeerLost, match="the disk is full"), run.first():
            raise OSError("the disk is full")
        run.barrier()
        return found

    assert on_ranks(3, work) == ["there"] * 3


def test_a_rank_that_ends_before_the_others() -> None:
    def work(run: duoka.Run) -> None:
        if run.is_first:
            run.all_sum(1)

    with pytest.raises(duoka.RanksApart):
        on_ranks(2, work)


def test_a_model_that_keeps_a_method_of_its_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
            self.body = self.normed

        def normed(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.one(x)).relu()  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def work(run: duoka.Run) -> tuple[list[float], int]:
        model = run.model(Net())
        data = torch.arange(42.0).view(14, 3) / 42
        losses = [model(x).square().mean().item() for (x,) in run.loader((data,), batch_size=7)]
        return losses, len(run._session.view.whole_operations)

    expected, _ = on_ranks(1, work)[0]
    assert on_ranks(2, work) == [(pytest.approx(expected, rel=1e-5), 0)] * 2
