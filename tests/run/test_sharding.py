from __future__ import annotations

import tempfile
import time
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before ranks are forked, as it takes seconds
from torch.nn import functional as F

import duoka
from duoka.errors import OptionError
from tests.run.ranks import on_ranks
from tests.strategies.test_fsdp import LABELS, ROWS, mlp, refused, trained


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"precision": "fp16"}, "precision must be left out with strategy='fsdp'.*bf16 is allowed"),
        ({"compile": True}, "compile must be left out with strategy='fsdp'"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view must be left out"),
        ({"devices": 2}, "devices must be given with strategy='dp' only"),
        ({"shares": 4}, "shares must be given with strategy='exact'"),
    ],
)
def test_options_that_cannot_be_had(ranks: int, how: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        on_ranks(ranks, lambda run: run.model(mlp(), strategy="fsdp", **how))


def test_runs_that_cannot_have_it() -> None:
    refused(lambda run: run.model(mlp(), strategy="fsdp"), OptionError, "compress='bf16'", compress="bf16")

    def exact(run: duoka.Run) -> None:
        run.model(mlp(), strategy="exact")
        run.model(mlp(), strategy="fsdp")

    refused(exact, OptionError, "strategy='fsdp'")


def test_a_model_is_sharded_once() -> None:
    def work(run: duoka.Run) -> None:
        run.model(run.model(mlp(), strategy="fsdp"))

    refused(work, OptionError, "not sharded yet")


def test_it_is_not_predicted_with() -> None:
    def predicted(run: duoka.Run) -> None:
        duoka.predict(run.model(mlp(), strategy="fsdp"), ROWS)

    refused(predicted, OptionError, "a model that each process holds whole")


@pytest.mark.parametrize("where", ["call", "backward", "read"])
def test_a_rank_that_stays_away_is_named(where: str) -> None:
    def begin() -> None:
        with duoka.start(seed=0) as run:
            model = run.model(mlp(), strategy="fsdp")
            for number, (x, y) in enumerate(run.loader((ROWS, LABELS), 5)):
                away = run.rank == 1 and number == 4  # in a call that is not looked at
                time.sleep(60 * (away and where == "call"))
                loss = F.cross_entropy(model(x), y)
                time.sleep(60 * (away and where == "backward"))
                loss.backward()
                time.sleep(60 * (away and where == "read"))
                model[0].weight.grad.norm().item()

    waited = {"call": r"forward\(Sequential\)"}.get(where, where)
    with pytest.raises(duoka.TimedOut, match=rf"rank 1 .*has not joined {waited} \d+ at"):
        duoka.launch(begin, devices="cpu:2", timeout=2)


def test_torch_s_own_group_is_used_where_there_is_one() -> None:
    def work(run: duoka.Run) -> Any:
        store = torch.distributed.FileStore(run.gather_objects(name)[0], 2)
        torch.distributed.init_process_group("gloo", store=store, rank=run.rank, world_size=2)
        group = torch.distributed.group.WORLD
        found = trained(run, mlp, "fsdp")
        return found, torch.distributed.group.WORLD is group

    with tempfile.TemporaryDirectory() as folder:
        name = f"{folder}/store"
        found, other = on_ranks(2, work)
    assert found == other
    assert found[1]
